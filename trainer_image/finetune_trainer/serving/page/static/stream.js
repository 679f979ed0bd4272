// Server-sent events of the completions API: yields each piece of text.

function piece(block) {
  const data = block
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
  if (!data || data === "[DONE]") return "";
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message ?? String(event.error));
  const [choice] = event.choices ?? [];
  return choice?.delta?.content ?? choice?.text ?? "";
}

export async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    const blocks = (waiting + (value ?? "")).split(/\r?\n\r?\n/);
    waiting = done ? "" : blocks.pop();
    for (const block of blocks) {
      const text = piece(block);
      if (text) yield text;
    }
    if (done) return;
  }
}
