-- Health of a FineTuneJob for Argo CD: https://argo-cd.readthedocs.io/en/stable/operator-manual/health/
-- Healthy: it has succeeded, or serves. Degraded: it has failed, or is refused. Suspended: it waits for `suspend: false`.
-- Progressing: everything between.
local function told(condition)
  if condition.message ~= nil and condition.message ~= "" then
    return condition.message
  end
  return condition.reason
end

local status = obj.status
if status == nil or status.conditions == nil then
  return { status = "Progressing", message = "The operator has not looked at the job yet." }
end
if status.observedGeneration == nil or status.observedGeneration < obj.metadata.generation then
  return { status = "Progressing", message = "The operator has not seen the newest spec yet." }
end

local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end
local function is(name, value)
  return conditions[name] ~= nil and conditions[name].status == value
end

if is("Failed", "True") then
  return { status = "Degraded", message = told(conditions["Failed"]) }
end
if is("Succeeded", "True") then
  return { status = "Healthy", message = told(conditions["Succeeded"]) }
end
for _, name in ipairs({ "Accepted", "Planned" }) do
  if is(name, "False") then
    return { status = "Degraded", message = told(conditions[name]) }
  end
end
if status.phase == "Suspended" then
  return { status = "Suspended", message = "The job is suspended." }
end
if is("Stalled", "True") then
  return { status = "Degraded", message = told(conditions["Stalled"]) }
end
if status.phase == "Serving" and is("Ready", "True") then
  return { status = "Healthy", message = told(conditions["Ready"]) }
end

local message = status.phase or "Pending"
if status.progress ~= nil and status.progress.percent ~= nil then
  message = message .. " " .. string.format("%d", status.progress.percent) .. " %"
end
return { status = "Progressing", message = message }
