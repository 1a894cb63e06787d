// The table of requests. Each has its life as a bar on one time axis that ends now.
// What runs is drawn tall, what waits flat, so that nobody has to rely on the colours.

import { colour, duration, el, fitted, hue, milliseconds, number, setText, short, $ } from "./dom.js";
import { isRunning } from "./state.js";

const FIRST_SHOWN = 100;
const ENDED_SHOWN = 20;
const [ENDED_IN_WINDOW, ENDED_AGE_MS] = [6, 120000]; // those that the axis reaches back for
const WINDOWS_S = [10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900];
const [BAR_HEIGHT, FLAT] = [18, 6];
const TALL = new Set(["prefill", "decode"]);
const SAY = {
  waiting: "waiting", prefill: "prefill", decode: "decode", preempted: "preempted",
  swapped: "swapped", lost: "worker lost",
  stop: "done", length: "done (limit)", abort: "aborted", error: "failed",
};

/** What a request went through, in words. */
export function lifeText(phases, endMs) {
  const parts = phases.map(({ phase, at }, i) => {
    const until = i + 1 < phases.length ? phases[i + 1].at : endMs;
    return `${SAY[phase] ?? phase} ${duration(until - at)}`;
  });
  return parts.join(", ");
}

function cell(name, ...children) {
  return el("td", { class: name }, ...children);
}

class Line {
  constructor(id, onPick) {
    this.id = id;
    this.swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    this.button = el("button", { type: "button", class: "id", title: id }, this.swatch, short(id));
    this.button.addEventListener("click", () => onPick(id));
    this.tenant = cell("admin-only tenant");
    this.state = el("span", { class: "state" });
    this.worker = cell("roomy");
    this.tokens = cell("number tokens");
    this.preemptions = cell("number roomy");
    this.canvas = el("canvas", { class: "bar", role: "img" });
    this.node = el("tr", { "data-id": id }, el("th", { scope: "row" }, this.button), this.tenant,
      cell("", this.state), this.worker, this.tokens, this.preemptions, cell("life", this.canvas));
  }

  tell(row, state, endMs) {
    this.phases = row.phases;
    setText(this.tenant, row.tenant);
    setText(this.state, SAY[state] ?? state);
    this.state.dataset.state = state;
    setText(this.worker, row.worker || "–");
    setText(this.tokens, `${number(row.prompt)} → ${number(row.output)}`);
    setText(this.preemptions, row.preemptions ? String(row.preemptions) : "");
    this.describe(endMs);
  }

  describe(endMs) {
    const text = lifeText(this.phases, endMs);
    if (this.canvas.getAttribute("aria-label") !== text) {
      this.canvas.setAttribute("aria-label", text);
      this.canvas.title = text;
    }
  }

  /** Draw the bar: phases from `arrival` to `end`, on an axis from `from` to `to`. */
  draw(width, arrival, end, from, to) {
    this.canvas.style.width = `${width}px`;
    const context = fitted(this.canvas, width, BAR_HEIGHT);
    context.clearRect(0, 0, width, BAR_HEIGHT);
    const x = (at) => Math.max(0, ((at - from) / (to - from)) * width);
    this.phases.forEach(({ phase, at }, i) => {
      const until = i + 1 < this.phases.length ? arrival + this.phases[i + 1].at : end;
      const left = x(arrival + at);
      const length = Math.max(x(until) - left, until > from ? 1.5 : 0);
      if (length <= 0) return;
      const height = TALL.has(phase) ? BAR_HEIGHT : FLAT;
      context.fillStyle = colour(`phase-${phase in SAY ? phase : "waiting"}`);
      context.fillRect(left, (BAR_HEIGHT - height) / 2, length, height);
      if (phase === "swapped" || phase === "lost") this.notch(context, left, length, height);
    });
  }

  /** A second sign beside the colour: gaps in the bar. */
  notch(context, left, length, height) {
    for (let x = left + 3; x < left + length - 1; x += 6) {
      context.clearRect(x, (BAR_HEIGHT - height) / 2, 2, height);
    }
  }
}

export class Requests {
  constructor(pool, onPick) {
    this.pool = pool;
    this.onPick = onPick;
    this.live = new Map(); // id -> Line
    this.over = new Map();
    this.showsAll = false;
    this.order = [];
    $("more").addEventListener("click", () => {
      this.showsAll = !this.showsAll;
      this.sort();
      this.drawBars();
    });
    new ResizeObserver(() => this.drawBars()).observe($("requests-scroll"));
    this.inSight = new Set(); // rows; of the others no bar is drawn
    this.sight = new IntersectionObserver((rows) => {
      for (const { target, isIntersecting } of rows) {
        if (isIntersecting) this.inSight.add(target);
        else this.inSight.delete(target);
      }
      this.drawBars();
    }, { rootMargin: "120px" });
  }

  update(changed) {
    const now = this.pool.now();
    if (changed.all || changed.table) this.sort();
    for (const place of changed.touched) {
      const row = this.pool.rows.get(place);
      const line = row && this.live.get(row.id);
      if (line) this.tell(line, row, now);
    }
    if (changed.all || changed.ended) this.sortEnded();
    this.count();
    this.drawBars();
  }

  tell(line, row, now) {
    line.tell(row, row.state, now - row.arrival);
    line.swatch.style.background = hue(row.place);
    line.swatch.classList.toggle("is-empty", !isRunning(row));
  }

  /** Bring the lines into the order of arrival; those that are there already stay. */
  sort() {
    const rows = [...this.pool.rows.values()].sort((a, b) => a.arrival - b.arrival);
    const shown = this.showsAll ? rows : rows.slice(0, FIRST_SHOWN);
    const now = this.pool.now();
    const before = this.live;
    this.live = new Map();
    for (const row of shown) {
      const line = before.get(row.id) ?? new Line(row.id, this.onPick);
      this.live.set(row.id, line);
      this.tell(line, row, now);
    }
    this.order = shown;
    this.place($("live"), this.live);
    $("more").hidden = rows.length <= FIRST_SHOWN;
    setText($("more"), this.showsAll ? `Show the first ${FIRST_SHOWN}` : `Show all ${number(rows.length)}`);
    this.mark();
    this.showEmpty();
  }

  count() {
    const total = this.pool.rows.size + this.pool.hidden;
    let running = 0;
    for (const row of this.pool.rows.values()) running += isRunning(row) ? 1 : 0;
    setText($("requests-count"), total ? `${number(running)} running · ${number(total - running)} waiting` : "");
  }

  sortEnded() {
    const rows = this.pool.ended.slice(-ENDED_SHOWN).reverse();
    const before = this.over;
    this.over = new Map();
    for (const row of rows) {
      const line = before.get(row.id) ?? new Line(row.id, this.onPick);
      this.over.set(row.id, line);
      line.tell(row, row.reason, row.ms);
      line.node.classList.add("is-over");
    }
    this.place($("ended"), this.over);
    this.showEmpty();
  }

  /** Show these lines, and know which of them are in sight. */
  place(parent, lines) {
    const nodes = [...lines.values()].map((line) => line.node);
    const before = new Set(parent.children);
    for (const node of nodes) if (!before.delete(node)) this.sight.observe(node);
    for (const node of before) {
      this.sight.unobserve(node);
      this.inSight.delete(node);
    }
    place(parent, nodes);
  }

  showEmpty() {
    const isEmpty = !this.live.size && !this.over.size;
    $("requests-empty").hidden = !isEmpty;
    $("table").hidden = isEmpty;
  }

  /** The axis: long enough for most, and of few lengths, so that it seldom jumps. */
  windowMs(now) {
    const lately = this.pool.ended.slice(-ENDED_IN_WINDOW).filter((one) => now - one.arrival < ENDED_AGE_MS);
    const oldest = Math.min(now, this.order[0]?.arrival ?? now, ...lately.map((one) => one.arrival));
    const needed = (now - oldest) / 1000;
    return 1000 * (WINDOWS_S.find((s) => s >= needed) ?? WINDOWS_S[WINDOWS_S.length - 1]);
  }

  drawBars() {
    const first = this.live.values().next().value ?? this.over.values().next().value;
    if (!first || $("table").hidden) return;
    const width = first.canvas.parentElement.clientWidth - 12;
    if (width <= 0) return;
    const now = this.pool.now();
    const length = this.windowMs(now);
    setText($("axis"), `last ${length < 120000 ? `${length / 1000} s` : `${length / 60000} min`}`);
    for (const row of this.order) {
      const line = this.live.get(row.id);
      if (this.inSight.has(line.node)) line.draw(width, row.arrival, now, now - length, now);
    }
    for (const row of this.pool.ended.slice(-ENDED_SHOWN)) {
      const line = this.over.get(row.id);
      if (!line || !this.inSight.has(line.node)) continue;
      line.draw(width, row.arrival, row.arrival + row.ms, now - length, now);
    }
  }

  // ---------------------------------------------------------------- the one that is looked at

  select(id) {
    this.selected = id;
    this.mark();
    this.describe();
  }

  mark() {
    for (const lines of [this.live, this.over]) {
      for (const line of lines.values()) {
        const isIt = line.id === this.selected;
        line.node.classList.toggle("is-selected", isIt);
        line.button.setAttribute("aria-pressed", String(isIt));
      }
    }
  }

  /** Everything about the selected request, and how to end it. */
  describe() {
    const panel = $("detail");
    const row = this.pool.byId.get(this.selected)
      ?? this.pool.ended.find((one) => one.id === this.selected);
    panel.hidden = !row;
    if (!row) return;
    const isLive = this.pool.byId.has(row.id);
    const lived = isLive ? this.pool.now() - row.arrival : row.ms;
    const facts = [
      ["Request", row.id], ["Tenant", row.tenant], ["Worker", row.worker || "–"],
      ["Priority", String(row.priority)],
      ["Tokens", `${number(row.prompt)} prompt, ${number(row.output)} output`],
      ["Preemptions", String(row.preemptions)],
      [isLive ? "Age" : "Lived", milliseconds(lived)], ["Life", lifeText(row.phases, lived)],
    ];
    if (!this.facts || this.shown !== `${row.id}${isLive}`) {
      this.shown = `${row.id}${isLive}`;
      this.facts = new Map(facts.map(([name]) => [name, el("dd")]));
      const list = el("dl", {}, ...facts.map(([name]) => el("div", {}, el("dt", { text: name }), this.facts.get(name))));
      const close = el("button", { type: "button", class: "quiet", text: "Close" });
      close.addEventListener("click", () => this.onPick(null));
      const buttons = el("div", { class: "detail-actions" }, close);
      if (isLive) {
        const cancel = el("button", { type: "button", text: "Cancel request" });
        cancel.addEventListener("click", () => this.onCancel(row));
        buttons.prepend(cancel);
      }
      panel.replaceChildren(list, buttons);
    }
    for (const [name, text] of facts) if (this.facts.has(name)) setText(this.facts.get(name), text);
  }
}

/** Give a parent these children in this order, moving as few as possible. */
function place(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let next = parent.firstElementChild;
  for (const node of nodes) {
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
}
