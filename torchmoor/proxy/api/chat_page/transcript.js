// Downloads a session as a Markdown file.

export function download(session) {
  const url = URL.createObjectURL(new Blob([transcript(session)], { type: "text/markdown" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: `${fileName(session.title)}.md` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "session";

function transcript(session) {
  const parts = [`# ${session.title}`, `Model: ${session.endpoint}`];
  if (session.system) parts.push(`System prompt:\n\n${quoted(session.system)}`);
  for (const turn of session.turns) {
    parts.push("## Question", ...turn.pictures.map((picture) => `Picture: ${picture.name}`), quoted(turn.question));
    parts.push("## Answer", turn.text || "(none)", ...endOf(turn));
  }
  return `${parts.join("\n\n")}\n`;
}

const quoted = (text) => text.split("\n").map((line) => `> ${line}`).join("\n");

function endOf(turn) {
  if (turn.failure) return [`(${turn.failure.message})`];
  if (turn.wasStopped || turn.state === "stopped") return ["(stopped)"];
  return turn.finish === "length" ? ["(cut off at its maximum length)"] : [];
}
