// Updates of the page. Elements are reused and only changes are written, so that focus, selection, scroll position and
// screen readers keep their place. Texts are written as text, never as HTML, because names are untrusted.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);
export const part = (element, name) => element.querySelector(`[data-is="${name}"]`);
export const copy = (id) => $(id).content.firstElementChild.cloneNode(true);

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Makes an element with a text and attributes.
export function make(name, text = "", attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Returns the element in a cell; without one, makes it in place of a text.
export function only(cell, create) {
  if (!cell.firstElementChild) cell.replaceChildren(create());
  return cell.firstElementChild;
}

// Keeps one child per key, made by `create(key)`, in the order of the keys. An element in its place is not touched,
// because one that moves loses the focus.
export function keep(parent, keys, create) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const children = keys.map((key) => {
    const child = known.get(key) ?? create(key);
    known.delete(key);
    child.dataset.key = key;
    return child;
  });
  const kept = new Set(children); // all others are removed, also the first of two children with one key
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  children.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
  return children;
}

// Adds an SVG element.
export function draw(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
