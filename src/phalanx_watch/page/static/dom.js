/**
 * Builds the page's elements. Whatever comes from a run is text: nothing here reads HTML, so a run named "<script>"
 * is shown by that name. Styles are set through the CSSOM, which a strict content security policy allows.
 */

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Child | Child[]} Children */

/**
 * An element with its properties and children.
 *
 * `class`, `text`, `data` (data-*), `style` (CSS properties), `on` (listeners) are understood; anything else is an attribute,
 * left out if null or false.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...Children} children
 * @returns {any}
 */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. @param {string} tag @param {Record<string, any>} [properties] @param {...Children} children @returns {any} */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

/** @param {any} element @param {Record<string, any>} properties @param {Children[]} children */
function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name === "text") element.textContent = String(value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") style(element, value);
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

/** @param {any} element @param {Record<string, string | number>} properties CSS properties, custom ones included */
export function style(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, String(value));
}

/** @param {Children[]} children @returns {(Node | string)[]} */
function nodes(children) {
  return /** @type {(Node | string)[]} */ (
    children.flat(3).filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : String(child)))
  );
}

/** Replaces all children. @param {Element} host @param {...Children} children */
export function put(host, ...children) {
  host.replaceChildren(...nodes(children));
}

/** Sets an element's text, if it is another one: untouched text keeps a reader's selection. @param {Element} element @param {string} text */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Brings the children of `host` in line with `items`, keeping the element of each key: focus and scroll survive a refresh.
 * @template T
 * @param {Element} host @param {T[]} items @param {(item: T) => string} key
 * @param {(item: T) => HTMLElement} make @param {(element: any, item: T) => void} update
 */
export function keyed(host, items, key, make, update) {
  const old = new Map([...host.children].map((child) => [/** @type {HTMLElement} */ (child).dataset.key, child]));
  let place = host.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = old.get(name);
    old.delete(name);
    if (!element) {
      element = make(item);
      /** @type {HTMLElement} */ (element).dataset.key = name;
    }
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else host.insertBefore(element, place);
  }
  for (const element of old.values()) element.remove();
}

/** A color of the style sheet as the canvas understands it. @param {string} name such as "--accent" @returns {string} */
export function color(name) {
  const probe = el("span", { style: { color: `var(${name})`, display: "none" } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** What a view shows in place of what is not there, and what to do about it. @param {string} title @param {...Children} advice */
export function empty(title, ...advice) {
  return el("div", { class: "empty" }, el("h2", { text: title }), el("p", {}, ...advice));
}

/** A command that can be copied. @param {string} text */
export function command(text) {
  return el("code", { class: "command", text });
}

/** @param {string} title @param {...Children} children */
export function panel(title, ...children) {
  return el("section", { class: "panel" }, el("h2", { text: title }), ...children);
}

/**
 * A table of a head and of rows of cells.
 * @param {Children[]} head @param {Children[][]} rows @param {string} [caption]
 * @param {number[]} [numeric] columns that stand on the right @param {number} [wide] the column that takes the room which is left
 */
export function table(head, rows, caption = "", numeric = [], wide = -1) {
  const side = (/** @type {number} */ index) => (numeric.includes(index) ? "number" : index === wide ? "wide" : null);
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": caption || "table" },
    el(
      "table",
      { class: wide >= 0 ? "fitted" : null },
      caption && el("caption", { class: "hidden", text: caption }),
      el("thead", {}, el("tr", {}, head.map((cell, index) => (cell === "" ? el("td", { class: side(index) }) : el("th", { scope: "col", class: side(index) }, cell))))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, index) => el("td", { class: side(index) }, cell))))),
    ),
  );
}

/** A choice out of few, as a row of buttons. @param {string} label @param {[string, string][]} options value, text @param {string} chosen @param {(value: string) => void} act */
export function choice(label, options, chosen, act) {
  const host = el("div", { class: "choice", role: "radiogroup", "aria-label": label });
  const buttons = options.map(([value, text]) =>
    el("button", {
      type: "button", role: "radio", text, "aria-checked": String(value === chosen), data: { value },
      on: {
        click: () => {
          for (const button of buttons) button.setAttribute("aria-checked", String(button.dataset.value === value));
          act(value);
        },
      },
    }),
  );
  host.append(...buttons);
  return host;
}

/** A labeled drop-down. @param {string} label @param {[string, string][]} options @param {string} chosen @param {(value: string) => void} act */
export function select(label, options, chosen, act) {
  const box = el("select", { on: { change: () => act(box.value) } }, options.map(([value, text]) => el("option", { value, text, selected: value === chosen })));
  return el("label", { class: "field" }, el("span", { text: label }), box);
}
