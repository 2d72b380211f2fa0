// Shows the Markdown of answers. markdown-it only parses it: HTML stays text, and all elements are made here. So an
// answer cannot cause markup, scripts or requests. Pictures in answers are not loaded, but shown as links.

import MarkdownIt from "./markdown-it.js";

const parser = new MarkdownIt({ html: false, linkify: false, breaks: true });
const LINKS = ["http:", "https:", "mailto:"];
const TAGS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li",
  table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td", em: "em", strong: "strong", s: "s",
};

// Show a text in an element. Nodes that have not changed stay, with the user's selection in them.
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

// Returns the elements of tokens, which are in a flat list: an opening token, its content, a closing token.
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

// Returns the element that a token adds, and the element for its content.
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

// A relative address, or one of another scheme, becomes text.
function linkTo(address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !LINKS.includes(url.protocol)) return make("span");
  return make("a", "", { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href });
}

// A keyboard scrolls only the element that has the focus.
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
