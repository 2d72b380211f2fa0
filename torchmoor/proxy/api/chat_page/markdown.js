// Markdown of answers as elements. markdown-it only parses: HTML stays text, and each element below is made here, so an
// answer can bring neither markup, nor scripts, nor requests. Pictures of answers are not loaded, but shown as links.

import MarkdownIt from "./markdown-it.js";

const parser = new MarkdownIt({ html: false, linkify: false, breaks: true });
const LINKS = ["http:", "https:", "mailto:"];
const TAGS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li",
  table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td", em: "em", strong: "strong", s: "s",
};

// Show a text in an element; what is shown already and has not changed stays, with the user's selection in it.
export function showMarkdown(box, text) {
  const fresh = [...renderAll(parser.parse(text, {})).childNodes];
  fresh.forEach((node, at) => {
    const old = box.childNodes[at];
    if (!old) box.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (box.childNodes.length > fresh.length) box.lastChild.remove();
}

function make(tag, content = "", fields = {}) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(content);
  return element;
}

// The elements of tokens, which are flat: an opening one, its content, and a closing one.
function renderAll(tokens) {
  const stack = [document.createDocumentFragment()];
  for (const token of tokens) {
    if (token.nesting === -1) {
      stack.pop();
      continue;
    }
    const [outer, inner] = elementsOf(token);
    stack.at(-1).append(outer);
    if (token.nesting === 1) stack.push(inner);
  }
  return stack[0];
}

// What a token adds, and where its content belongs.
function elementsOf(token) {
  const name = token.type.replace(/_open$/, "");
  if (name === "inline") return [renderAll(token.children)];
  if (name === "heading") return twice(make("h4", "", { className: token.tag })); // below the turn's own heading
  if (name === "link") return twice(linkTo(token.attrGet("href")));
  if (name === "image") {
    const link = linkTo(token.attrGet("src"));
    link.append(token.content || token.attrGet("src"));
    return [link];
  }
  if (name === "fence" || name === "code_block") return [codeBlock(token.content, token.info.trim().split(/\s/)[0])];
  if (name === "code_inline") return [make("code", token.content)];
  if (name === "hr") return [make("hr")];
  if (name === "softbreak" || name === "hardbreak") return [make("br")];
  if (name === "table") {
    const table = make("table");
    return [scrolling(make("div", table, { className: "wide" })), table];
  }
  if (TAGS[name]) {
    const element = make(TAGS[name]);
    if (name === "ordered_list" && token.attrGet("start")) element.start = Number(token.attrGet("start"));
    if (name === "paragraph" && token.hidden) return twice(make("span")); // of a tight list
    return twice(element);
  }
  return twice(document.createTextNode(token.content));
}

const twice = (element) => [element, element];

// Addresses of other kinds, and those that lead to this server, are text.
function linkTo(address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !LINKS.includes(url.protocol)) return make("span");
  return make("a", "", { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href });
}

// With a keyboard, only what has the focus can be scrolled.
function scrolling(element) {
  element.tabIndex = 0;
  return element;
}

function codeBlock(code, language) {
  const box = make("div", "", { className: "code" });
  const head = make("p", make("span", language || "code"));
  if (navigator.clipboard) {
    const button = make("button", "Copy", { type: "button", className: "plain" });
    button.setAttribute("aria-label", "Copy the code");
    button.dataset.copies = "code";
    head.append(button);
  }
  box.append(head, scrolling(make("pre", make("code", code.replace(/\n$/, "")))));
  return box;
}
