// The connection to the gateway: one stream of events, taken up again whenever it breaks.
// A key goes into a header, never into an address, and lives no longer than the tab.

const KEY = "pagestream-key";
const SILENCE_MS = 6000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10000;

export const savedKey = () => sessionStorage.getItem(KEY) || "";
export const saveKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

export function headers(more = {}) {
  const key = savedKey();
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

/** Read server-sent events from a response: calls `take(kind, data)` for each. */
export async function readEvents(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let kind = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) take(kind, data.join("\n"));
    }
  }
}

/** What a gateway says is wrong, in its own words where it has any. */
export async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

export class Stream {
  /** `on` has: event(kind, value), live(), lost(why, pauseMs), refused(status, why). */
  constructor(address, on) {
    this.address = address;
    this.on = on;
    this.pause = FIRST_PAUSE_MS;
    this.isWanted = false;
    this.timer = 0;
  }

  open() {
    this.close();
    this.isWanted = true;
    this.connect();
  }

  close() {
    this.isWanted = false;
    clearTimeout(this.timer);
    this.abort?.abort();
  }

  async connect() {
    const abort = (this.abort = new AbortController());
    let why = "the gateway ended the stream";
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(new Error("the gateway has fallen silent")), SILENCE_MS);
    };
    try {
      heard();
      const response = await fetch(this.address, {
        headers: headers(), signal: abort.signal, cache: "no-store",
      });
      if (response.status === 401 || response.status === 403) {
        this.isWanted = false;
        this.on.refused(response.status, await problemOf(response));
        return;
      }
      if (!response.ok) throw new Error(await problemOf(response));
      await readEvents(response, (kind, data) => {
        if (abort !== this.abort || abort.signal.aborted) return;
        heard();
        if (this.pause !== FIRST_PAUSE_MS || kind === "hello") {
          this.pause = FIRST_PAUSE_MS;
          this.on.live();
        }
        this.on.event(kind, JSON.parse(data));
      });
    } catch (error) {
      why = abort.signal.aborted ? abort.signal.reason?.message || why : error.message;
      if (error instanceof TypeError) why = "the gateway cannot be reached";
    } finally {
      clearTimeout(silence);
    }
    if (!this.isWanted || abort !== this.abort) return;
    const pause = this.pause * (0.75 + Math.random() / 2);
    this.pause = Math.min(2 * this.pause, LONGEST_PAUSE_MS);
    this.timer = setTimeout(() => this.connect(), pause);
    this.on.lost(why, pause);
  }
}
