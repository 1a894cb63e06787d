// What is known of the pool: all there is from one "all" event, then what changes.

const NUM_POINTS = 180;
const NUM_EVENTS = 100;
const NUM_ENDED = 64;

export const FREE = 0;
export const CACHED = 1;
export const HELD = 2;
const FIRST = 4;

/** Place in the table of the request that holds a block, or -1. */
export const placeOf = (owner) => (owner < FIRST ? -1 : (owner - FIRST) >> 1);
export const isShared = (owner) => owner >= FIRST && (owner & 1) === 1;

/** Running, in the sense of: it has a seat on a worker. */
export const isRunning = (row) => row.state === "prefill" || row.state === "decode";

function phasesOf(text) {
  return text.split(",").map((part) => {
    const [phase, at] = part.split(":");
    return { phase, at: Number(at) };
  });
}

function rowOf([place, id, tenant, worker, priority, prompt, output, preemptions, arrival, life]) {
  const phases = phasesOf(life);
  const state = phases[phases.length - 1].phase;
  return { place, id, tenant, worker, priority, prompt, output, preemptions, arrival, phases, state };
}

function endedOf([id, tenant, worker, priority, prompt, output, preemptions, arrival, life, ms, reason]) {
  const phases = phasesOf(life);
  return { id, tenant, worker, priority, prompt, output, preemptions, arrival, phases, ms, reason };
}

const eventOf = ([at, kind, about, says, tenant]) => ({ at, kind, about, says, tenant });

export class Pool {
  constructor() {
    this.clockOffset = 0;
    this.reset();
  }

  reset() {
    this.rows = new Map(); // by place
    this.byId = new Map();
    this.maps = new Map(); // "worker/kind" -> {worker, kind, owners}
    this.events = [];
    this.ended = [];
    this.points = [];
    this.workers = [];
    this.processes = [];
    this.limits = {};
    this.figures = {};
    this.hidden = 0;
    this.state = "";
    this.problem = "";
  }

  /** Time of the gateway's clock, in ms. */
  now() {
    return Date.now() + this.clockOffset;
  }

  /** Take an event over. Says what changed: rows, table, maps (whole), cells, events, … */
  apply(kind, value) {
    const changed = { touched: new Set(), cells: new Map(), whole: new Set() };
    if (kind === "all") {
      this.reset();
      changed.all = true;
    }
    this.clockOffset = value.now - Date.now();
    this.figures = value.pool ?? this.figures;
    this.hidden = value.hidden ?? 0;
    this.state = value.state;
    this.problem = value.problem ?? "";
    for (const place of value.gone ?? []) {
      const row = this.rows.get(place);
      if (row) this.byId.delete(row.id);
      this.rows.delete(place);
      changed.table = true;
    }
    for (const raw of value.rows ?? []) {
      const row = rowOf(raw);
      if (this.rows.get(row.place)?.id !== row.id) changed.table = true;
      this.rows.set(row.place, row);
      this.byId.set(row.id, row);
      changed.touched.add(row.place);
    }
    const outputs = value.outputs ?? [];
    for (let i = 0; i < outputs.length; i += 2) {
      const row = this.rows.get(outputs[i]);
      if (row) {
        row.output = outputs[i + 1];
        changed.touched.add(row.place);
      }
    }
    this.applyMaps(value, changed);
    for (const name of ["workers", "processes", "limits"]) {
      if (value[name]) {
        this[name] = value[name];
        changed[name] = true;
      }
    }
    if (value.events) {
      changed.news = value.events.map(eventOf);
      this.events = [...this.events, ...changed.news].slice(-NUM_EVENTS);
    }
    if (value.ended) {
      this.ended = [...this.ended, ...value.ended.map(endedOf)].slice(-NUM_ENDED);
      changed.ended = true;
    }
    if (value.points) {
      this.points = [...this.points, ...value.points].slice(-NUM_POINTS);
      changed.points = true;
    }
    return changed;
  }

  applyMaps(value, changed) {
    for (const { worker, kind, runs } of value.maps ?? []) {
      let length = 0;
      for (let i = 1; i < runs.length; i += 2) length += runs[i];
      const owners = new Uint16Array(length);
      let at = 0;
      for (let i = 0; i < runs.length; i += 2) {
        owners.fill(runs[i], at, at + runs[i + 1]);
        at += runs[i + 1];
      }
      const key = `${worker}/${kind}`;
      this.maps.set(key, { worker, kind, owners });
      changed.whole.add(key);
    }
    for (const { worker, kind, cells } of value.cells ?? []) {
      const key = `${worker}/${kind}`;
      const map = this.maps.get(key);
      if (!map) continue;
      for (let i = 0; i < cells.length; i += 2) map.owners[cells[i]] = cells[i + 1];
      changed.cells.set(key, cells);
    }
    if (value.workers) {
      const names = new Set(value.workers.map((one) => one.name));
      for (const [key, map] of this.maps) if (!names.has(map.worker)) this.maps.delete(key);
    }
  }
}
