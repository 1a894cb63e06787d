// The console: one stream in, and each part of the page follows what concerns it.

import { BlockMaps } from "./blocks.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Controls } from "./controls.js";
import { $, clock, forgetColours, setText } from "./dom.js";
import { Events } from "./events.js";
import { Requests } from "./requests.js";
import { Pool } from "./state.js";
import { Stream, forgetKey, headers, problemOf, saveKey, savedKey } from "./stream.js";

const pool = new Pool();
const charts = new Charts($("charts"));
const maps = new BlockMaps(pool, $("maps"), $("maps-empty"), select);
const requests = new Requests(pool, select);
const events = new Events(select);
const controls = new Controls(pool);
const chat = new Chat();
let lastHeard = 0;
let selected = null;
let hello = null;

// ---------------------------------------------------------------- the stream

const stream = new Stream("console/feed", {
  live() {
    setLink("live", "Live");
    $("banner").hidden = true;
  },

  lost(why, pauseMs) {
    setLink("lost", "Connection lost");
    const since = lastHeard ? ` What you see is from ${clock(lastHeard)}.` : "";
    setText($("banner-text"), `Connection lost: ${why}. Trying again in ${Math.ceil(pauseMs / 1000)} s.${since}`);
    $("banner").hidden = false;
  },

  refused(status, why) {
    setLink("shut", "Signed out");
    $("banner").hidden = true;
    $("main").hidden = true;
    $("door").hidden = false;
    const isKnown = status === 401 && savedKey() !== "";
    setText($("door-problem"), status === 403 || isKnown ? sentence(why) : "");
    $("sign-out").hidden = true;
    $("key").focus();
  },

  event(kind, value) {
    lastHeard = Date.now();
    if (kind === "hello") greet(value);
    else follow(kind, value);
  },
});

function greet(value) {
  hello = value;
  chat.model = value.model;
  controls.greet(value);
  $("main").hidden = false;
  if (!$("door").hidden) $("main").focus();
  $("door").hidden = true;
  $("sign-out").hidden = !value.has_keys;
  document.body.dataset.role = value.role;
  $("legend-others").hidden = value.role === "admin";
  const who = value.has_keys ? ` · ${value.role === "admin" ? "administrator" : `tenant ${value.tenant}`}` : "";
  setText($("where"), `${value.model} · pool ${value.pool}${who}`);
  document.title = `${value.model} · PageStream console`;
}

function follow(kind, value) {
  const changed = pool.apply(kind, value);
  const isDraining = pool.state === "draining";
  if (pool.problem) setLink("trouble", "No view of the pool");
  else setLink(isDraining ? "draining" : "live", isDraining ? "Live · this gateway drains" : "Live");
  $("banner").hidden = !pool.problem;
  if (pool.problem) setText($("banner-text"), `${sentence(pool.problem)} What you see may be old.`);
  if (changed.all || changed.points) charts.draw(pool.points);
  maps.update(changed);
  requests.update(changed);
  if (changed.all) events.showAll(pool.events);
  else if (changed.news) events.add(changed.news);
  controls.update(changed);
  if (selected) keepSelection();
}

function setLink(state, text) {
  $("link").dataset.state = state;
  setText($("link-text"), text);
  document.body.classList.toggle("is-stale", state === "lost" || state === "trouble");
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

// ---------------------------------------------------------------- what is looked at

function select(id) {
  selected = id === selected ? null : id;
  keepSelection(true);
}

function keepSelection(isNew = false) {
  const place = pool.byId.get(selected)?.place ?? null;
  if (isNew || place !== keepSelection.place) maps.select(place);
  keepSelection.place = place;
  if (isNew) requests.select(selected);
  else requests.describe();
}

requests.onCancel = async (row) => {
  const more = hello.role === "admin" ? { "X-Tenant": row.tenant } : {};
  try {
    const response = await fetch(`v1/requests/${row.id}`, { method: "DELETE", headers: headers(more) });
    if (!response.ok) setText($("announce"), await problemOf(response));
    else setText($("announce"), "The request is cancelled.");
  } catch {
    setText($("announce"), "The gateway cannot be reached.");
  }
};

// ---------------------------------------------------------------- key, theme, buttons

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key").value.trim());
  $("key").value = "";
  setLink("connecting", "Connecting");
  stream.open();
});

$("sign-out").addEventListener("click", () => {
  forgetKey();
  chat.clear();
  pool.reset();
  stream.open();
});

$("retry").addEventListener("click", () => stream.open());

const THEMES = { auto: ["◐", "Auto", "as the system"], light: ["☀", "Light", "light"], dark: ["☾", "Dark", "dark"] };
let theme = localStorage.getItem("pagestream-theme") || "auto";

function showTheme() {
  if (!(theme in THEMES)) theme = "auto";
  const [sign, name, words] = THEMES[theme];
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Theme: ${words}`);
  $("theme").firstChild.textContent = `${sign} `;
  setText($("theme").lastElementChild, name);
  forgetColours();
  maps.drawAll();
  requests.sort();
  requests.drawBars();
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  localStorage.setItem("pagestream-theme", theme);
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && $("link").dataset.state === "lost") stream.open();
});

showTheme();
stream.open();
