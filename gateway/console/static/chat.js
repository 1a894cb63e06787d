// A chat with the model that is served, over the same API that everybody uses.

import { $, el, milliseconds, number, setText } from "./dom.js";
import { headers, problemOf, readEvents } from "./stream.js";

export class Chat {
  constructor() {
    this.model = "";
    this.messages = [];
    this.abort = null;
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("chat-stop").addEventListener("click", () => this.abort?.abort());
    $("chat-clear").addEventListener("click", () => this.clear());
    this.clear();
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    setText($("chat-figures"), "");
    const hint = "Say something, and watch it run in the memory map.";
    $("talk").replaceChildren(el("p", { class: "hint", text: hint }));
  }

  async send() {
    const text = $("chat-input").value.trim();
    if (!text || this.abort) return;
    $("chat-input").value = "";
    if (!this.messages.length) $("talk").replaceChildren();
    this.messages.push({ role: "user", content: text });
    this.say("user", text);
    const answer = this.say("assistant", "");
    const abort = (this.abort = new AbortController());
    this.show(true);
    const figures = { began: performance.now(), first: null, tokens: 0 };
    let said = "";
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: headers({ "Content-Type": "application/json" }),
        body: JSON.stringify({
          model: this.model, messages: this.messages, stream: true,
          max_tokens: Math.max(1, Number($("chat-tokens").value) || 256),
          stream_options: { include_usage: true },
        }),
        signal: abort.signal,
      });
      if (!response.ok) throw new Error(await problemOf(response));
      await readEvents(response, (_, data) => {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const piece = chunk.choices?.[0]?.delta?.content ?? "";
        if (chunk.usage) figures.tokens = chunk.usage.completion_tokens;
        if (!piece) return;
        figures.first ??= performance.now();
        figures.tokens += chunk.usage ? 0 : 1;
        said += piece;
        this.write(answer, said);
        this.tell(figures);
      });
      this.tell(figures);
    } catch (error) {
      const why = abort.signal.aborted ? "Stopped." : error.message;
      answer.append(el("span", { class: abort.signal.aborted ? "stopped" : "wrong", text: why }));
    } finally {
      if (this.abort === abort) this.abort = null;
      if (said) this.messages.push({ role: "assistant", content: said });
      else this.messages.pop();
      answer.removeAttribute("aria-busy");
      this.show(false);
    }
  }

  say(role, text) {
    const node = el("div", { class: `message ${role}` },
      el("span", { class: "visually-hidden", text: role === "user" ? "You: " : "The model: " }),
      el("span", { class: "text", text }));
    if (role === "assistant") node.setAttribute("aria-busy", "true");
    $("talk").append(node);
    this.scroll();
    return node;
  }

  write(node, text) {
    setText(node.querySelector(".text"), text);
    this.scroll();
  }

  scroll() {
    const talk = $("talk");
    talk.scrollTop = talk.scrollHeight;
  }

  tell({ began, first, tokens }) {
    if (first === null) return;
    const seconds = (performance.now() - first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? ` · ${number((tokens - 1) / seconds)} tokens/s` : "";
    setText($("chat-figures"), `First token after ${milliseconds(first - began)} · ${number(tokens)} tokens${speed}`);
  }

  show(isBusy) {
    $("chat-stop").hidden = !isBusy;
    $("chat-send").disabled = isBusy;
    if (!isBusy && document.activeElement === $("chat-stop")) $("chat-input").focus();
  }
}
