// The block map: a square a block, of each pool of each worker, on a canvas.
// Lightness tells free, cached and held apart; the colour says whose it is.

import { colour, el, fitted, hue, number, setText, short } from "./dom.js";
import { CACHED, FREE, HELD, isShared, placeOf } from "./state.js";

const HEIGHTS = { gpu: 224, cpu: 96 };
const [SMALLEST, LARGEST] = [3, 18];
const WHAT = { gpu: "", cpu: "CPU pool" };

class BlockMap {
  constructor(pool, key, onPick) {
    Object.assign(this, { pool, key, onPick, cursor: -1, selected: null, width: 0 });
    const { worker, kind } = pool.maps.get(key);
    this.title = el("h3", {}, worker, WHAT[kind] ? el("span", { class: "kind", text: ` ${WHAT[kind]}` }) : "");
    this.state = el("span", { class: "tag" });
    this.counts = el("span", { class: "counts" });
    this.canvas = el("canvas", { class: "blocks" });
    this.mark = el("span", { class: "mark", hidden: "" });
    this.box = el("div", {
      class: "map-box", tabindex: "0", role: "slider", "aria-valuemin": "0",
      "aria-label": `Blocks of ${worker} ${WHAT[kind]}`.trim(), "aria-orientation": "horizontal",
    }, this.canvas, this.mark);
    this.node = el("section", { class: "map", "data-map": key, "aria-label": `Worker ${worker} ${WHAT[kind]}`.trim() },
      el("div", { class: "map-head" }, this.title, this.state, this.counts), this.box);
    this.box.addEventListener("pointermove", (event) => this.point(this.blockAt(event)));
    this.box.addEventListener("pointerleave", () => this.point(-1));
    this.box.addEventListener("click", (event) => this.pick(this.blockAt(event)));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("blur", () => this.point(-1));
    this.box.addEventListener("focus", () => this.box.matches(":focus-visible") && this.point(Math.max(0, this.cursor)));
  }

  get owners() {
    return this.pool.maps.get(this.key).owners;
  }

  // ---------------------------------------------------------------- size

  /** Choose the largest square with which all blocks fit; of very many, several share one. */
  lay() {
    const width = this.box.clientWidth;
    const height = HEIGHTS[this.pool.maps.get(this.key).kind];
    const count = Math.max(1, this.owners.length);
    this.size = LARGEST;
    while (this.size > SMALLEST && Math.ceil(count / Math.floor(width / this.size)) * this.size > height) {
      this.size -= 1;
    }
    this.columns = Math.max(1, Math.floor(width / this.size));
    const most = this.columns * Math.floor((2 * height) / this.size);
    this.share = Math.ceil(count / most); // blocks in a square
    this.rows = Math.ceil(count / this.share / this.columns);
    this.width = width;
    this.canvas.style.height = `${this.rows * this.size}px`;
    this.canvas.style.width = `${this.columns * this.size}px`;
    this.context = fitted(this.canvas, this.columns * this.size, this.rows * this.size);
  }

  // ---------------------------------------------------------------- drawing

  draw() {
    this.lay();
    this.context.clearRect(0, 0, this.columns * this.size, this.rows * this.size);
    const squares = Math.ceil(this.owners.length / this.share);
    for (let square = 0; square < squares; square += 1) this.square(square);
    this.count();
  }

  redraw(cells) {
    if (!this.context || this.box.clientWidth !== this.width) {
      this.draw();
      return;
    }
    for (let i = 0; i < cells.length; i += 2) this.square(Math.floor(cells[i] / this.share));
    this.count();
    if (this.cursor >= 0) this.tell();
  }

  square(square) {
    const { context, size } = this;
    const owner = this.ownerOf(square);
    const x = (square % this.columns) * size;
    const y = Math.floor(square / this.columns) * size;
    const gap = size > 5 ? 1.5 : size > 3 ? 1 : 0.5;
    const side = size - gap;
    context.clearRect(x, y, size, size);
    const place = placeOf(owner);
    const isDim = this.selected !== null && place !== this.selected;
    context.globalAlpha = isDim ? 0.28 : 1;
    if (owner === FREE) context.fillStyle = colour("block-free");
    else if (owner === CACHED) context.fillStyle = colour("block-cached");
    else if (owner === HELD) context.fillStyle = colour("block-others");
    else context.fillStyle = hue(place);
    context.fillRect(x, y, side, side);
    if (isShared(owner)) {
      context.fillStyle = colour("block-shared");
      const dot = Math.max(1, Math.round(side / 3));
      context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
    }
    context.globalAlpha = 1;
  }

  /** Of the blocks in a square the one that says most. */
  ownerOf(square) {
    if (this.share === 1) return this.owners[square];
    let found = FREE;
    for (const owner of this.owners.subarray(square * this.share, (square + 1) * this.share)) {
      if (owner >= HELD) return owner;
      found = Math.max(found, owner);
    }
    return found;
  }

  count() {
    let [free, cached, shared] = [0, 0, 0];
    for (const owner of this.owners) {
      if (owner === FREE) free += 1;
      else if (owner === CACHED) cached += 1;
      else if (isShared(owner)) shared += 1;
    }
    const held = this.owners.length - free - cached;
    const parts = [`${number(held)} held`];
    if (shared) parts.push(`${number(shared)} shared`);
    if (cached) parts.push(`${number(cached)} cached`);
    parts.push(`${number(free)} free`);
    this.summary = `${parts.join(" · ")} of ${number(this.owners.length)}`;
    this.box.setAttribute("aria-valuemax", String(this.owners.length - 1));
    if (this.cursor < 0) this.summarize();
    const worker = this.pool.workers.find((one) => one.name === this.pool.maps.get(this.key).worker);
    setText(this.state, worker?.state ?? "");
    this.state.dataset.state = worker?.state ?? "";
  }

  summarize() {
    setText(this.counts, this.summary);
    this.box.setAttribute("aria-valuenow", "0");
    this.box.setAttribute("aria-valuetext", this.summary);
  }

  // ---------------------------------------------------------------- pointing

  blockAt(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - bounds.left) / this.size);
    const row = Math.floor((event.clientY - bounds.top) / this.size);
    if (column < 0 || column >= this.columns || row < 0 || row >= this.rows) return -1;
    const block = (row * this.columns + column) * this.share;
    return block < this.owners.length ? block : -1;
  }

  point(block) {
    this.cursor = block;
    this.mark.hidden = block < 0;
    if (block < 0) {
      this.summarize();
      return;
    }
    const square = Math.floor(block / this.share);
    this.mark.style.left = `${(square % this.columns) * this.size}px`;
    this.mark.style.top = `${Math.floor(square / this.columns) * this.size}px`;
    this.mark.style.width = this.mark.style.height = `${this.size}px`;
    this.tell();
  }

  tell() {
    const owner = this.owners[this.cursor];
    const row = this.pool.rows.get(placeOf(owner));
    let who = "free";
    if (owner === CACHED) who = "cached: nobody holds it, and it may be hit";
    else if (row) who = `request ${short(row.id)}${isShared(owner) ? ", shared with others" : ""}`;
    else if (owner >= HELD) who = "held by a request that is not shown";
    setText(this.counts, `block ${this.cursor}: ${who}`);
    this.box.setAttribute("aria-valuenow", String(this.cursor));
    this.box.setAttribute("aria-valuetext", this.counts.textContent);
  }

  pick(block) {
    const row = block < 0 ? undefined : this.pool.rows.get(placeOf(this.owners[block]));
    this.onPick(row ? row.id : null);
  }

  onKey(event) {
    const step = this.share;
    const moves = {
      ArrowLeft: -step, ArrowRight: step, ArrowUp: -step * this.columns, ArrowDown: step * this.columns,
      PageUp: -10 * step * this.columns, PageDown: 10 * step * this.columns,
      Home: -Infinity, End: Infinity,
    };
    if (event.key in moves) {
      const target = Math.max(0, this.cursor) + moves[event.key];
      this.point(Math.min(this.owners.length - 1, Math.max(0, target)));
    } else if (event.key === "Enter" || event.key === " ") {
      this.pick(this.cursor);
    } else if (event.key === "Escape") {
      this.onPick(null);
    } else {
      return;
    }
    event.preventDefault();
  }
}

export class BlockMaps {
  constructor(pool, parent, empty, onPick) {
    Object.assign(this, { pool, parent, empty, onPick, maps: new Map() });
    new ResizeObserver(() => this.drawAll()).observe(parent);
  }

  /** Follow a change; whole maps are drawn anew, of others only the squares that changed. */
  update(changed) {
    const isOther = changed.whole.size || this.maps.size !== this.pool.maps.size;
    if (isOther) this.rebuild();
    for (const [key, cells] of changed.cells) this.maps.get(key)?.redraw(cells);
    if (changed.workers && !isOther) for (const map of this.maps.values()) map.count();
  }

  rebuild() {
    const names = this.pool.workers.map((one) => one.name);
    const keys = [...this.pool.maps.keys()].sort((a, b) => {
      const [x, y] = [this.pool.maps.get(a), this.pool.maps.get(b)];
      return names.indexOf(x.worker) - names.indexOf(y.worker) || (x.kind < y.kind ? 1 : -1);
    });
    for (const key of this.maps.keys()) if (!this.pool.maps.has(key)) this.maps.delete(key);
    for (const key of keys) {
      if (!this.maps.has(key)) this.maps.set(key, new BlockMap(this.pool, key, this.onPick));
    }
    const nodes = keys.map((key) => this.maps.get(key).node);
    if (nodes.some((node, i) => this.parent.children[i] !== node) || nodes.length !== this.parent.children.length) {
      this.parent.replaceChildren(...nodes);
    }
    this.empty.hidden = keys.length > 0;
    this.drawAll();
  }

  drawAll() {
    for (const map of this.maps.values()) if (map.box.clientWidth) map.draw();
  }

  select(place) {
    for (const map of this.maps.values()) map.selected = place;
    this.drawAll();
  }
}
