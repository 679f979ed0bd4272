// What differs from task to task: the fields, an example, the request's body, and how the answer is shown. Text of the
// model is put in as text only: it may hold markup.

export function element(name, attributes = {}, ...content) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  created.append(...content);
  return created;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const TEXT = { id: "text", label: "Text" };
const ROWS_SHOWN = 10;

// One list of answers, also where the server puts it into a list for the only row.
function flat(answer) {
  return Array.isArray(answer) && Array.isArray(answer[0]) ? answer[0] : [answer].flat();
}

function bars(rows, caption, name, chosen) {
  const body = rows.map(([label, score, note], at) => {
    const meter = element("progress", { max: "1", value: String(score), "aria-label": `${name} ${label}` });
    const row = element("tr", chosen(score, at) ? { class: "best" } : {});
    row.append(
      element("th", { scope: "row" }, label, ...(note ? [element("span", { class: "quiet" }, ` ${note}`)] : [])),
      element("td", { class: "share" }, percent(score)),
      element("td", { class: "bar" }, meter),
    );
    return row;
  });
  const head = element("tr", {}, ...[name, "Probability", "Share"].map((text) => element("th", { scope: "col" }, text)));
  head.lastChild.replaceChildren(element("span", { class: "hidden" }, "Bar"));
  const table = (part) =>
    element("table", {}, element("caption", { class: "hidden" }, caption), element("thead", {}, head.cloneNode(true)), element("tbody", {}, ...part));
  const shown = [table(body.slice(0, ROWS_SHOWN))];
  const rest = body.slice(ROWS_SHOWN);
  if (rest.length) shown.push(element("details", {}, element("summary", {}, `${rest.length} more`), table(rest)));
  return shown;
}

function classified(answer, values, model) {
  const found = flat(answer);
  if (model.label_form === "regression") {
    return found.map((each) =>
      element("p", {}, ...(found.length > 1 ? [`${each.label}: `] : []), element("span", { class: "figure" }, String(Number(each.score.toPrecision(6))))),
    );
  }
  const several = model.label_form === "multi_label_classification";
  const rows = found.toSorted((one, other) => other.score - one.score);
  const picked = rows.filter((each, at) => (several ? each.score > 0.5 : at === 0)).map((each) => each.label);
  const summary = picked.length ? picked.join(", ") : "No label is above 50 %.";
  return [
    element("p", { class: "figure" }, summary),
    ...bars(rows.map((each) => [each.label, each.score, several && each.score > 0.5 ? "✓ chosen" : ""]), "Labels and their probabilities", "Label",
      (score, at) => (several ? score > 0.5 : at === 0)),
  ];
}

// The server counts characters as Python does; a string of JavaScript counts halves of some.
function passage(text, spans, mark) {
  const characters = Array.from(text);
  const shown = element("p", { class: "text passage" });
  let at = 0;
  for (const span of spans.toSorted((one, other) => one.start - other.start)) {
    if (span.start < at) continue;
    shown.append(characters.slice(at, span.start).join(""), mark(span, characters.slice(span.start, span.end).join("")));
    at = span.end;
  }
  shown.append(characters.slice(at).join(""));
  return shown;
}

function entities(answer, values) {
  const found = [answer].flat(2).map((each) => ({ ...each, label: each.entity_group ?? each.entity }));
  if (!found.length) return [element("p", {}, "No entities in this text."), passage(values.text, [], null)];
  const labels = [...new Set(found.map((each) => each.label))].toSorted();
  const tint = (label) => `e${labels.indexOf(label) % 8}`;
  const marked = (span, words) =>
    element("mark", { class: tint(span.label), title: percent(span.score) }, words, element("span", { class: "tag" }, span.label));
  const legend = labels.map((label) =>
    element("li", {}, element("mark", { class: tint(label) }, label), ` ${found.filter((each) => each.label === label).length}`),
  );
  return [passage(values.text, found, marked), element("ul", { class: "legend", "aria-label": "Labels and how often each was found" }, ...legend)];
}

function answered(answer, values) {
  const [best] = [answer].flat();
  if (!best || !best.answer) return [element("p", {}, "The model found no answer to this question in the paragraph."), passage(values.context, [], null)];
  const answerLine = element("p", {}, element("span", { class: "figure" }, best.answer));
  if (typeof best.score === "number") answerLine.append(element("span", { class: "quiet" }, ` ${percent(best.score)}`));
  return [answerLine, passage(values.context, [best], (span, words) => element("mark", {}, words))];
}

function written(answer) {
  return flat(answer).map((each) => {
    const text = each.summary_text ?? each.translation_text ?? each.generated_text ?? "";
    return text ? element("p", { class: "text box" }, text) : element("p", {}, "The model generated no text.");
  });
}

function filled(answer) {
  const lists = Array.isArray(answer[0]) ? answer : [answer];
  return lists.flatMap((list, at) => [
    ...(lists.length > 1 ? [element("h3", {}, `Gap ${at + 1}`)] : []),
    ...bars(list.map((each) => [each.token_str.trim() || "(space)", each.score, ""]), `Words for gap ${at + 1}`, "Word", (score, place) => place === 0),
  ]);
}

const inputs = (values) => ({ inputs: values.text });
const WRITES = { fields: () => [TEXT], body: inputs, show: written };

export const TASKS = {
  "text-classification": {
    fields: (model) => (model.pairs ? [{ id: "text", label: "First text" }, { id: "text_pair", label: "Second text" }] : [TEXT]),
    example: { text: "The plot is thin, but the actors are a joy to watch.", text_pair: "The actors are good." },
    body: (values, model) => ({
      inputs: model.pairs ? { text: values.text, text_pair: values.text_pair } : values.text,
      parameters: { top_k: Math.max(1, (model.labels ?? []).length) },
    }),
    show: classified,
  },
  "token-classification": {
    fields: () => [TEXT],
    example: { text: "Ada Lovelace met Charles Babbage in London in June 1833." },
    body: inputs,
    show: entities,
  },
  "question-answering": {
    fields: () => [{ id: "question", label: "Question", line: true }, { id: "context", label: "Paragraph" }],
    example: {
      question: "When did the first steam train run between the two cities?",
      context: "The railway between Liverpool and Manchester was opened in 1830. It was the first that ran by a timetable and drew all its trains with steam.",
    },
    body: (values) => ({ inputs: { question: values.question, context: values.context } }),
    show: answered,
  },
  summarization: {
    ...WRITES,
    example: {
      text: "The town council met on Monday. After two hours of debate it agreed to close the old bridge for repairs from March on. Buses will take another way, and the council expects the work to last until the autumn.",
    },
  },
  translation: { ...WRITES, example: { text: "The train leaves at nine." } },
  "masked-lm": {
    fields: (model) => [{ ...TEXT, note: `Write ${model.mask_token ?? "[MASK]"} in place of the word to predict.` }],
    example: (model) => ({ text: `The capital of France is ${model.mask_token ?? "[MASK]"}.` }),
    body: inputs,
    show: filled,
  },
};
const CHAT = { chat: true, fields: (model) => [{ id: "text", label: model.chat === false ? "Text to continue" : "Message" }], example: { text: "Name three things to see in Prague." } };
TASKS["text-generation"] = CHAT;
TASKS["preference-tuning"] = CHAT;
