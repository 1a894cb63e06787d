// What happened, newest first. Only what matters is read out.

import { $, clock, el, setText, short } from "./dom.js";

const SHOWN = 60;

const KINDS = {
  leader_changed: ["★", "Leader changed", "note"],
  worker_added: ["+", "Worker joined", "good"],
  worker_lost: ["✕", "Worker lost", "bad"],
  worker_refused: ["✕", "Worker refused", "bad"],
  gateway_joined: ["+", "Gateway joined", "good"],
  gateway_draining: ["↓", "Gateway drains", "note"],
  gateway_left: ["−", "Gateway left", "note"],
  settings_changed: ["≡", "Settings changed", "note"],
  preempted: ["↺", "Preempted", "plain"],
  swapped: ["⇄", "Swapped out", "plain"],
  failed: ["!", "Request failed", "bad"],
  events_skipped: ["…", "More happened", "plain"],
};

const READ_OUT = new Set(["leader_changed", "worker_lost"]);
const ABOUT_REQUESTS = new Set(["preempted", "swapped", "failed"]);

export class Events {
  constructor(onPick) {
    this.onPick = onPick;
  }

  /** Show all there are. */
  showAll(events) {
    $("events").replaceChildren(...events.slice(-SHOWN).reverse().map((one) => this.line(one)));
    this.showEmpty();
  }

  /** Put new ones on top. */
  add(events) {
    const list = $("events");
    for (const one of events) list.prepend(this.line(one));
    while (list.children.length > SHOWN) list.lastElementChild.remove();
    const loud = events.filter((one) => READ_OUT.has(one.kind)).at(-1);
    if (loud) setText($("announce"), `${KINDS[loud.kind][1]}: ${loud.about}. ${loud.says}`);
    this.showEmpty();
  }

  showEmpty() {
    $("events-empty").hidden = $("events").children.length > 0;
    $("events").hidden = !$("events-empty").hidden;
  }

  line(one) {
    const [sign, title, tone] = KINDS[one.kind] ?? ["·", one.kind, "plain"];
    const about = one.about && this.about(one);
    return el("li", { "data-kind": one.kind, "data-tone": tone },
      el("span", { class: "sign", "aria-hidden": "true", text: sign }),
      el("p", {}, el("b", { text: title }), about ? " " : "", about || "",
        el("span", { class: "says", text: one.says })),
      el("time", { datetime: new Date(one.at).toISOString(), text: clock(one.at) }));
  }

  about(one) {
    if (!ABOUT_REQUESTS.has(one.kind)) return el("span", { class: "about", text: one.about });
    const button = el("button", { type: "button", class: "id", title: one.about, text: short(one.about) });
    button.addEventListener("click", () => this.onPick(one.about));
    return button;
  }
}
