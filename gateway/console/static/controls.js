// What administrators may change: limits while the pool runs, the prefix cache, this gateway's drain.

import { $, el, setText } from "./dom.js";
import { headers, problemOf } from "./stream.js";

const CHOICES = {
  SCHEDULING_POLICY: ["fcfs", "priority", "sjf", "deadline"],
  PREEMPTION_MODE: ["auto", "swap", "recompute"],
  PREEMPTION_VICTIM: ["newest", "cheapest"],
  DEADLINE_ACTION: ["refuse", "end", "ignore"],
  RESERVE_FULL_PROMPT: ["true", "false"],
};

const LABELS = {
  MAX_NUM_SEQS: "Running requests, at most",
  MAX_NUM_BATCHED_TOKENS: "Tokens in a step, at most",
  LONG_PREFILL_TOKEN_THRESHOLD: "Tokens of one prompt in a step",
  SCHEDULING_POLICY: "Policy",
  PREEMPTION_MODE: "Preemption by",
  PREEMPTION_VICTIM: "Who yields",
  DEADLINE_ACTION: "Missed deadlines",
  RESERVE_FULL_PROMPT: "Reserve the whole prompt",
  WATERMARK: "Blocks kept free (share)",
  RESERVED_BLOCKS: "Blocks for the system class",
  PRIORITY_AGEING_S: "Ageing of priorities, s",
  QUEUE_TIMEOUT_S: "Longest wait, s (0: none)",
  BATCH_WAIT_MS: "Wait for a batch, ms",
};

const FIRST = Object.keys(LABELS);

export class Controls {
  constructor(pool) {
    this.pool = pool;
    this.fields = new Map();
    this.known = {};
    $("limits-form").addEventListener("submit", (event) => this.apply(event));
    $("limits-form").addEventListener("reset", (event) => this.undo(event));
    $("limits-form").addEventListener("input", () => this.mark());
    $("cache-reset").addEventListener("click", () => this.resetCache());
    $("drain").addEventListener("click", () => $("drain-dialog").showModal());
    $("drain-dialog").addEventListener("close", () => {
      if ($("drain-dialog").returnValue === "yes") this.drain();
      $("drain-dialog").returnValue = "";
    });
  }

  greet(hello) {
    $("controls").hidden = hello.role !== "admin";
    setText($("drain-name"), hello.gateway);
  }

  update(changed) {
    if (changed.all || changed.limits) this.showLimits();
    if (changed.all || changed.processes || changed.workers) this.showProcesses();
    const isDraining = this.pool.state === "draining";
    $("drain").disabled = isDraining;
    setText($("drain"), isDraining ? "This gateway drains" : "Drain this gateway");
  }

  // ---------------------------------------------------------------- limits

  showLimits() {
    const limits = this.pool.limits;
    const names = Object.keys(limits).sort((a, b) => FIRST.indexOf(a) - FIRST.indexOf(b));
    for (const name of names) {
      const isTouched = this.fields.has(name) && this.fields.get(name).value !== this.known[name];
      if (!this.fields.has(name)) this.addField(name);
      if (!isTouched) this.fields.get(name).value = limits[name];
    }
    this.known = { ...limits };
    this.mark();
  }

  addField(name) {
    const id = `limit-${name}`;
    const field = name in CHOICES
      ? el("select", { id, name }, ...CHOICES[name].map((one) => el("option", { value: one, text: one })))
      : el("input", { id, name, type: "number", step: "any", min: "0", inputmode: "decimal" });
    this.fields.set(name, field);
    const label = el("label", { for: id, title: name, text: LABELS[name] ?? name });
    $("limits").append(el("div", { class: "limit" }, label, field));
  }

  changes() {
    const found = {};
    for (const [name, field] of this.fields) {
      if (field.value !== this.known[name]) found[name] = field.value;
    }
    return found;
  }

  mark() {
    const found = this.changes();
    for (const [name, field] of this.fields) field.classList.toggle("is-changed", name in found);
    $("limits-apply").disabled = !Object.keys(found).length;
    $("limits-reset").disabled = $("limits-apply").disabled;
  }

  undo(event) {
    event.preventDefault();
    for (const [name, field] of this.fields) field.value = this.known[name];
    this.say("");
    this.mark();
  }

  async apply(event) {
    event.preventDefault();
    const asked = this.changes();
    const answer = await this.ask("admin/config", "PATCH", asked);
    if (!answer) return;
    Object.assign(this.known, asked);
    this.say(`In force: ${Object.entries(asked).map(([n, v]) => `${n}=${v}`).join(", ")}`);
    this.mark();
  }

  async resetCache() {
    if (await this.ask("admin/reset_prefix_cache", "POST")) this.say("The prefix cache is empty.");
  }

  async drain() {
    const answer = await this.ask("admin/drain", "POST");
    if (answer) this.say(`Draining; open requests: ${answer.num_open}`);
  }

  async ask(path, method, body) {
    try {
      const response = await fetch(path, {
        method,
        headers: headers({ "Content-Type": "application/json" }),
        body: body && JSON.stringify(body),
      });
      if (response.ok) return await response.json();
      this.say(await problemOf(response), true);
    } catch {
      this.say("The gateway cannot be reached.", true);
    }
    return null;
  }

  say(text, isBad = false) {
    setText($("limits-outcome"), text);
    $("limits-outcome").classList.toggle("is-bad", isBad);
  }

  // ---------------------------------------------------------------- processes

  showProcesses() {
    const workers = this.pool.workers.map((one) => ({ role: "worker", ...one }));
    const lines = [...this.pool.processes, ...workers].map((one) =>
      el("li", {}, el("span", { class: "role", text: one.role }), el("span", { class: "about", text: one.name }),
        el("span", { class: "tag", "data-state": one.state, text: one.state })));
    $("processes").replaceChildren(...lines);
  }
}
