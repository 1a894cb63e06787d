// Small tools: elements, numbers, colours. Text goes in as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** Make an element with properties and children; strings among them become text. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Change a text only if it is another: what did not change is not laid out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Math.abs(value) < 10 && value % 1 !== 0 ? fine.format(value) : whole.format(value);
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${number(ms)} ms`;
  return duration(ms);
}

export function duration(ms) {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en", { hour12: false });
}

export const short = (id) => id.slice(0, 8);

// ---------------------------------------------------------------- colours for canvases

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
let known = new Map();

/** Colour of a custom property as a canvas takes it, in the theme of now. */
export function colour(name) {
  if (!known.has(name)) {
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

export function forgetColours() {
  known = new Map();
}

export const NUM_HUES = 14;

/** A request's colour by its place; the same in the map, the table and the legend. */
export const hue = (place) => colour(`hue-${place % NUM_HUES}`);

/** Give a canvas the size of its box, sharp on every screen; its context, in CSS pixels. */
export function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
