// Sends what is in the fields to the server that the page is from, and shows the answer.
import { TASKS, element } from "./tasks.js";
import { pieces } from "./stream.js";

const at = (id) => document.getElementById(id);
// The first one answers requests that name none. All have the same task.
const models = JSON.parse(document.body.dataset.models);
let model = models[0];
const task = TASKS[model.task];
const fields = task.fields(model);
const NOTHING_YET = task.chat ? "No messages yet." : "No answer yet: fill in the fields and send them, or use the example.";
let underWay = null;
let conversation = [];

function addFields() {
  for (const { id, label, line, note } of fields) {
    const box = element(line ? "input" : "textarea", { id, ...(line ? { type: "text" } : { rows: task.chat ? "2" : "4" }) });
    const field = element("div", { class: "field" }, element("label", { for: id }, label), box);
    if (note) {
      box.setAttribute("aria-describedby", `${id}-note`);
      field.append(element("p", { id: `${id}-note`, class: "quiet" }, note));
    }
    box.addEventListener("input", () => box.removeAttribute("aria-invalid"));
    at("fields").append(field);
  }
}

const fieldValues = () => Object.fromEntries(fields.map(({ id }) => [id, at(id).value]));

function problem(text) {
  at("problem").replaceChildren(...(text ? [element("p", { class: "box bad text" }, text)] : []));
}

function clear() {
  problem("");
  at("took").textContent = "";
  conversation = [];
  const empty = element("p", { class: "quiet", id: "empty" }, NOTHING_YET);
  const log = element("ol", { class: "talk", id: "talk" });
  at("answer").replaceChildren(empty, ...(task.chat ? [log] : []));
}

function missing() {
  const empty = fields.find(({ id }) => !at(id).value.trim());
  if (!empty) return false;
  at(empty.id).setAttribute("aria-invalid", "true");
  at(empty.id).focus();
  problem(`"${empty.label}" is empty: fill it in, or use the example.`);
  return true;
}

function request(values) {
  if (!task.chat) return [model === models[0] ? "/" : `/models/${encodeURIComponent(model.name)}`, task.body(values, model)];
  if (model.chat === false) return ["/v1/completions", { model: model.name, prompt: values.text, stream: true }];
  return ["/v1/chat/completions", { model: model.name, messages: [...conversation, { role: "user", content: values.text }], stream: true }];
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function showCurl(path, body) {
  const token = at("token").value ? ` \\\n  -H "Authorization: Bearer $TOKEN"` : "";
  at("curl").textContent = `curl ${task.chat ? "-N " : ""}${quoted(location.origin + path)} \\\n  -H 'Content-Type: application/json'${token} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

async function errorMessage(response) {
  let reason = "";
  try {
    const body = await response.json();
    const error = body.error ?? body.detail ?? body.message;
    reason = typeof error === "string" ? error : (error?.message ?? JSON.stringify(body));
  } catch {
    reason = "No reason given.";
  }
  if (response.status === 401) {
    at("token-field").hidden = false;
    at("token").focus();
    return at("token").value ? `The server rejected this token. ${reason}` : `The server requires a token. ${reason}`;
  }
  const again = response.headers.get("Retry-After");
  const wait = again === null ? "" : ` Try again in ${again} s.`;
  return `The server answered ${response.status}: ${reason}${wait}`;
}

async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (at("token").value) headers.Authorization = `Bearer ${at("token").value}`;
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

function message(role, text) {
  const content = element("span", { class: "text" }, text);
  const line = element("li", { class: role }, element("span", { class: "speaker" }, role === "user" ? "You" : model.name), content);
  at("empty")?.remove();
  at("talk").append(line);
  return [line, content];
}

// Puts the pieces of an answer behind each other as they arrive. Readers of the screen hear it once it is whole.
async function follow(response, question) {
  if (model.chat === false) conversation = [];
  // Another one if it is cleared meanwhile.
  const turns = conversation;
  message("user", question);
  at("text").value = "";
  const [line, content] = message("assistant", "");
  const follows = () => line.scrollIntoView({ block: "nearest" });
  line.setAttribute("aria-busy", "true");
  try {
    for await (const piece of pieces(response)) {
      content.textContent += piece;
      follows();
    }
  } finally {
    line.removeAttribute("aria-busy");
    if (!content.textContent) content.textContent = "(empty answer)";
    else turns.push({ role: "user", content: question }, { role: "assistant", content: content.textContent });
  }
}

async function ask() {
  if (underWay || missing()) return;
  const values = fieldValues();
  const current = model;
  const [path, body] = request(values);
  const began = performance.now();
  const took = () => `${((performance.now() - began) / 1000).toFixed(2)} s`;
  showCurl(path, body);
  problem("");
  underWay = new AbortController();
  working(true);
  at("took").textContent = "Computing …";
  try {
    const response = await send(path, body, underWay.signal);
    if (!response.ok) {
      problem(await errorMessage(response));
      at("took").textContent = "";
      return;
    }
    if (task.chat) await follow(response, values.text);
    else at("answer").replaceChildren(...task.show(await response.json(), values, current));
    at("took").textContent = `Answered in ${took()}.`;
  } catch (error) {
    at("took").textContent = "";
    if (error.name === "AbortError") at("took").textContent = `Stopped after ${took()}.`;
    else if (error instanceof TypeError) problem("Cannot connect to the server: it has stopped, or the network fails. Try again later.");
    else problem(`The answer cannot be shown: ${error.message}`);
  } finally {
    underWay = null;
    working(false);
  }
}

function working(busy) {
  const focused = document.activeElement;
  at("stop").hidden = !busy;
  at("send").disabled = busy;
  at("fresh").hidden = !task.chat || !at("talk").childElementCount;
  // A button that is taken away must not take the keyboard's place with it.
  if (busy && focused === at("send")) at("stop").focus();
  if (!busy && focused === at("stop")) at("send").focus();
}

function fillExample() {
  const example = typeof task.example === "function" ? task.example(model) : task.example;
  for (const { id } of fields) {
    at(id).value = example[id];
    at(id).removeAttribute("aria-invalid");
  }
  at(fields[0].id).focus();
}

async function copy() {
  try {
    await navigator.clipboard.writeText(at("curl").textContent);
    at("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(at("curl"));
    at("copied").textContent = "The browser does not allow copying: press Ctrl+C.";
  }
}

function about() {
  const labels = model.labels ?? [];
  const some = labels.slice(0, 8).join(", ") + (labels.length > 8 ? `, and ${labels.length - 8} more` : "");
  return labels.length && model.label_form !== "regression" ? `${labels.length} labels: ${some}` : "";
}

function addModels() {
  at("model").append(...models.map(({ name }) => element("option", { value: name }, name)));
  at("model-field").hidden = models.length < 2;
}

function choose() {
  underWay?.abort();
  model = models.find(({ name }) => name === at("model").value);
  document.title = `${model.name} · finetune`;
  document.querySelector("h1").textContent = model.name;
  at("about").textContent = about();
  at("curl").textContent = "Send something first.";
  at("fresh").hidden = true;
  clear();
}

addFields();
addModels();
clear();
at("about").textContent = about();
at("curl").textContent = "Send something first.";
if (task.chat) {
  at("form").before(at("result"));
  at("result-heading").textContent = "Conversation";
  at("answer").setAttribute("role", "log");
}
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
at("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    ask();
  }
});
at("model").addEventListener("change", choose);
at("stop").addEventListener("click", () => underWay?.abort());
at("example").addEventListener("click", fillExample);
at("copy").addEventListener("click", copy);
at("fresh").addEventListener("click", () => {
  underWay?.abort();
  clear();
  at("fresh").hidden = true;
  at("text").focus();
});
