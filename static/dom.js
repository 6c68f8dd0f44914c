// Small tools for the page: elements, texts, numbers. Text from the router only ever becomes text, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Sets a text only where it differs, so that nothing is laid out in vain. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.round(value / 60)} min`;
}

export function millis(value) {
  return value === null || value === undefined ? "–" : seconds(value / 1000);
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}

export function rate(value) {
  return value >= 100 ? String(Math.round(value)) : value.toFixed(value < 10 ? 2 : 1);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  let size = value;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${size} B` : `${size.toFixed(1)} ${units[unit]}`;
}

/**
 * Keeps a table's body at these rows, by key: rows that stay keep their elements, and with them the
 * keyboard's focus. `fill` gets the row's cells.
 */
export function keyedRows(body, items, keyOf, create, fill) {
  const known = body.keyed ?? new Map();
  const next = new Map();
  let place = body.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let row = known.get(key);
    if (!row) row = create(item);
    fill(row, item);
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
    next.set(key, row);
  }
  for (const [key, row] of known) if (!next.has(key)) row.remove();
  body.keyed = next;
}

/** A table with a caption for those who do not see it. */
export function table(caption, headings) {
  const body = make("tbody");
  const head = make("tr", {}, ...headings.map((heading) => make("th", { scope: "col" }, heading)));
  const element = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, head), body);
  // Whoever has no mouse scrolls it with the arrows, and so must be able to come to it.
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, element);
  return { element: scroll, body };
}

/** A row of so many cells, the first of them its heading. */
export function blankRow(cells) {
  const row = make("tr", {}, make("th", { scope: "row" }));
  for (let cell = 1; cell < cells; cell += 1) row.append(make("td"));
  return row;
}

export function fillRow(row, texts) {
  texts.forEach((text, place) => {
    if (text !== undefined) setText(row.children[place], text);
  });
}
