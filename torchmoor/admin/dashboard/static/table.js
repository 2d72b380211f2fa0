// A live table in pages, which a click on a column's name sorts. Row elements are reused. The order of rows does not
// change while the pointer or the focus is in them, so that no button moves away.

import { $, keep, make, say, setAttribute } from "./dom.js";
import { count, number } from "./words.js";

const PAGE = 25;

export class Table {
  // root: an element of the page with a <table> and an element [data-is=pages]. noun: the name of a row in texts.
  // columns: title, value(row) to sort by (without it, the column is not sortable), fill(cell, row), and is: "name" (the
  // cell names the row), "figure" or "actions". key(row): a unique text. sort: {column, isDown} at first.
  // nothing: the text if there are no rows.
  constructor(root, { columns, key, sort, noun, nothing, page = PAGE, holdsOrder = true }) {
    Object.assign(this, { root, columns, key, sort, noun, nothing, page, holdsOrder });
    this.rows = [];
    this.start = 0;
    this.order = [];
    this.head = root.querySelector("thead tr");
    this.body = root.querySelector("tbody");
    this.pages = root.querySelector('[data-is="pages"]');
    this.panel = root.querySelector(".wide");
    this.#makeHead();
    this.#makePages();
    // On a phone the rows are drawn as cards; the roles keep it a table for screen readers.
    root.querySelector("table").setAttribute("role", "table");
    for (const group of root.querySelectorAll("thead, tbody")) group.setAttribute("role", "rowgroup");
    this.head.setAttribute("role", "row");
  }

  // Draw these rows.
  show(rows) {
    this.rows = rows;
    this.#draw();
  }

  toStart() {
    this.start = 0;
    this.order = [];
  }

  #makeHead() {
    for (const [at, column] of this.columns.entries()) {
      const cell = make("th", "", { scope: "col", role: "columnheader" });
      if (column.is === "figure" || !column.value) cell.className = column.value ? "figure" : "unsorted";
      if (column.value) {
        const button = make("button", column.title, { type: "button" });
        button.onclick = () => this.#sortBy(at);
        cell.append(button);
      } else {
        cell.textContent = column.title;
      }
      this.head.append(cell);
    }
  }

  #makePages() {
    this.range = make("span");
    this.previous = make("button", "Previous", { type: "button", "aria-label": `Previous ${this.noun}s` });
    this.next = make("button", "Next", { type: "button", "aria-label": `Next ${this.noun}s` });
    this.previous.onclick = () => this.#turn(-this.page);
    this.next.onclick = () => this.#turn(this.page);
    this.pages.append(this.range, this.previous, this.next);
  }

  #turn(by) {
    this.start = Math.max(0, this.start + by);
    this.order = [];
    this.#draw();
  }

  #sortBy(at) {
    this.sort = { column: at, isDown: this.sort.column === at ? !this.sort.isDown : this.columns[at].is === "figure" };
    this.toStart();
    this.#draw();
  }

  get #isHeld() {
    return this.holdsOrder && (this.body.matches(":hover") || this.body.contains(document.activeElement) || $("confirm").open);
  }

  #sorted() {
    const { column, isDown } = this.sort;
    const value = this.columns[column].value;
    const way = isDown ? -1 : 1;
    const compare = (a, b) =>
      typeof a === "string" || typeof b === "string"
        ? String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true })
        : (a ?? -Infinity) - (b ?? -Infinity) || 0;
    const rows = this.rows.map((row) => ({ row, key: this.key(row), value: value(row) }));
    const places = this.#isHeld ? new Map(this.order.map((key, at) => [key, at])) : new Map();
    const place = (each) => places.get(each.key) ?? Infinity;
    rows.sort((a, b) => {
      const [first, second] = [place(a), place(b)];
      if (first !== second) return first - second;
      return way * compare(a.value, b.value) || a.key.localeCompare(b.key, "en", { numeric: true });
    });
    this.order = rows.map((each) => each.key);
    return rows;
  }

  #draw() {
    if (this.start >= this.rows.length) this.start = Math.max(0, Math.floor((this.rows.length - 1) / this.page) * this.page);
    const shown = this.#sorted().slice(this.start, this.start + this.page);
    this.head.querySelectorAll("th").forEach((cell, at) => {
      const state = this.sort.column === at ? (this.sort.isDown ? "descending" : "ascending") : "none";
      if (this.columns[at].value) setAttribute(cell, "aria-sort", state);
    });
    const elements = keep(this.body, shown.map((each) => each.key), () => this.#makeRow());
    shown.forEach(({ row }, at) => {
      this.columns.forEach((column, which) => column.fill(elements[at].children[which], row));
    });
    const end = this.start + shown.length;
    const isWhole = shown.length === this.rows.length;
    const all = count(this.rows.length, this.noun);
    const range = isWhole ? all : `${number(this.start + 1)} to ${number(end)} of ${all}`;
    say(this.range, this.rows.length ? range : this.nothing);
    this.previous.disabled = this.start === 0;
    this.next.disabled = end >= this.rows.length;
    this.previous.hidden = this.next.hidden = isWhole;
    this.panel.hidden = !this.rows.length;
  }

  #makeRow() {
    const element = make("tr", "", { role: "row" });
    for (const column of this.columns) {
      const isName = column.is === "name";
      const cell = isName ? make("th", "", { scope: "row", role: "rowheader" }) : make("td", "", { role: "cell", class: column.is ?? "" });
      if (!isName && column.is !== "actions") cell.dataset.title = column.title;
      element.append(cell);
    }
    return element;
  }
}

// A column's cell with one text.
export const text = (write) => (cell, row) => say(cell, write(row));

// A cell with a badge and perhaps a text after it. write(row): {word, kind, more}; kind is the badge's class.
export function badge(write) {
  return (cell, row) => {
    if (!cell.firstElementChild) cell.append(make("span"), " ", make("span", "", { class: "quiet" }));
    const { word, kind, more = "" } = write(row);
    const [first, second] = cell.children;
    say(first, word);
    setAttribute(first, "class", word ? `badge ${kind || "plain"}` : "");
    say(second, more);
  };
}

// A cell with buttons. write(row): [{verb, label, press()}]; label names the verb and its object.
export function buttons(write) {
  return (cell, row) => {
    const wanted = write(row);
    const elements = keep(cell, wanted.map((each) => each.verb), () => make("button", "", { type: "button" }));
    wanted.forEach((each, at) => {
      say(elements[at], each.verb);
      setAttribute(elements[at], "aria-label", each.label);
      elements[at].onclick = each.press;
    });
  };
}

// Fill a <select> with these names, after one option for all. The choice stays if its name is still there.
export function offer(select, all, names) {
  const chosen = select.value;
  const options = keep(select, ["", ...names], () => make("option"));
  options.forEach((option, at) => {
    say(option, at ? names[at - 1] : all);
    option.value = at ? names[at - 1] : "";
  });
  select.value = names.includes(chosen) ? chosen : "";
}
