// The Findings tab: each finding with its evidence in numbers, its line, what to do about it, and what a replay says.

import { find, formatSeconds, formatTime, h, plural } from "../parts/dom.js";
import { chip, codeOf, copyButton, kindMark, NEEDS_KERNEL, NOT_HELD } from "../parts/widgets.js";

const SEVERITY = { high: "▲ high", medium: "◆ medium", low: "● low" };
const SHOWN_VALUES = 12;
const LAUNCHING = "Worth is kernels’ time. Launching takes longer: launches that a fix spares count.";
/** @type {Record<string, string>} */
const MOODS = { faster: "better", slower: "worse" };

/** @implements {Panel} */
export class FindingsPanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    this.element = h("div", { class: "tf-table-panel tf-findings", "data-testid": "tf-findings" });
    /** @type {Payload | null} */
    this.payload = null;
    /** @type {Status | null} */
    this.status = null;
    this.live = false;
    this.showsSmall = false;
    /** "KEY CHOICE" of what was asked for last. */
    this.asked = "";
  }

  /** @param {View} view */
  draw({ payload, status, live }) {
    if (payload === this.payload && status === this.status && live === this.live) return;
    this.payload = payload;
    this.status = status;
    this.live = live;
    const focused = this.element.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.testid : undefined;
    const { findings } = payload;
    const isLaunched = payload.clock?.launches && findings.length > 0;
    this.element.replaceChildren(...(isLaunched ? [h("p", { class: "tf-note" }, LAUNCHING)] : []), ...(findings.length > 0 ? findings.map((one) => this.card(one)) : nothing(payload.looked_for)), ...this.small(payload));
    if (focused) find(this.element, focused)?.focus({ preventScroll: true });
  }

  mark() {}

  /** Those that are too small to stand among the others: their count, and behind it a card each. @param {Payload} payload */
  small({ small, below }) {
    if (small.length === 0) return [];
    const details = h("details", { open: this.showsSmall, ontoggle: () => (this.showsSmall = details.open) }, h("summary", { class: "tf-note", "data-testid": "tf-small" }, below), h("div", { class: "tf-findings" }, small.map((one) => this.card(one))));
    return [details];
  }

  /** Where the host launches ops for longer than they run, it is their number that tells, of those that passes leave where they left some of it. @param {Finding} one */
  launched({ launches, launches_of: of, left }) {
    const { clock } = /** @type {Payload} */ (this.payload);
    const count = Math.round(launches);
    if (!clock?.launches || !count) return null;
    const us = (count * clock.takes_us[1]) / clock.launches[1];
    return h("p", { "data-testid": "tf-launched" }, h("span", { class: "tf-label" }, "launches "), `${count.toLocaleString("en")} of ${Math.round(of).toLocaleString("en")}${left ? "" : " as captured"}, ${formatTime(us)} of the host`);
  }

  /** Without what models, which is said in the head, once for all; of a step that waits for launches, by its kernels. @param {string} text */
  brief(text) {
    const { times, clock } = this.payload ?? {};
    const told = clock?.launches ? text.replace(/(of \S+ \S+) a step/, "$1 of kernels") : text;
    return times?.before?.startsWith("modelled: ") ? told.replaceAll(times.before, "modelled") : told;
  }

  /** @param {Finding} one */
  card(one) {
    const more = one.values.length - SHOWN_VALUES;
    return h(
      "article",
      { class: `tf-finding tf-finding-${one.is_mended ? "fixed" : one.severity}`, "aria-label": one.title, "data-key": one.key, "data-testid": `tf-finding-${one.id}` },
      h("div", { class: "tf-finding-head" }, h("span", { class: "tf-severity" }, one.is_mended ? `✓ ${one.severity}, mended` : SEVERITY[one.severity]), h("h3", null, one.title), h("code", { class: "tf-note" }, one.id)),
      one.evidence.length > 0 && h("table", { class: "tf-table" }, h("tbody", null, one.evidence.map(([label, value]) => h("tr", null, h("th", { scope: "row" }, label), h("td", null, value))))),
      one.source && h("p", null, h("span", { class: "tf-label" }, "line "), h("code", { class: "tf-source" }, one.source)),
      one.bars.length > 0 && bars(one.bars),
      one.fix && h("div", { class: "tf-block" }, copyButton(codeOf(one), "tf-copy"), h("pre", { tabindex: "0", "aria-label": "fix" }, one.fix)),
      one.worth && h("p", null, h("span", { class: "tf-label" }, "worth "), kindMark(one.kind), " ", this.brief(one.worth).replace(` (${one.kind})`, "")),
      this.launched(one),
      one.mended && h("p", null, h("span", { class: "tf-label" }, "passes "), this.brief(one.mended)),
      ...one.trials.map((trial, choice) => this.trial(one, trial, choice)),
      h("div", { class: "tf-finding-foot" }, this.tryIt(one), h("span", { class: "tf-chips" }, one.values.slice(0, SHOWN_VALUES).map((name) => chip(name, this.act)), more > 0 && `+${more}`)),
    );
  }

  /** What is tried, the button, and what the replay said beside it. @param {Finding} one @param {Trial} trial @param {number} choice */
  trial({ key, id }, { does, blocked, said, verdict }, choice) {
    const at = `${key} ${choice}`;
    const { busy, error } = /** @type {Status} */ (this.status);
    const isRunning = busy === "findings" && this.asked === at;
    const reason = !this.live ? NEEDS_KERNEL : blocked || this.payload?.blocked || "";
    const ask = () => {
      this.asked = at;
      this.act.ask("findings", { type: "try", finding: key, choice });
    };
    const title = reason || "replays the recorded trace without and with this, in turn; your code is not run again";
    const label = isRunning ? "Measuring…" : said ? "Try fix again" : "Try fix";
    return h(
      "div",
      { class: "tf-trial", "data-testid": `tf-trial-${id}-${choice}` },
      h("button", { class: "tf-button", disabled: reason !== "" || busy !== "", title, "aria-label": `${label}: ${does}`, onclick: ask, "data-testid": `tf-fix-${id}-${choice}` }, label),
      h("span", null, does, reason && h("small", { class: "tf-note" }, ` ${reason}`)),
      said && h("p", { class: `tf-said tf-${MOODS[verdict] ?? "same"}`, role: "status" }, said),
      error?.panel === "findings" && error.at === at && h("p", { class: "tf-blocked", role: "alert" }, error.message),
    );
  }

  /** @param {Finding} one */
  tryIt({ id, changes, is_mended }) {
    if (!changes || is_mended) return null;
    const isOn = Object.entries(changes).every(([option, value]) => JSON.stringify(this.payload?.config[option]) === JSON.stringify(value));
    if (isOn) return h("span", { class: "tf-note" }, "The pass that does this is on; its decisions say what it left.");
    const isHeld = this.act.holds(changes);
    const title = isHeld ? "switch it on, and see what changes" : NOT_HELD;
    return h("button", { class: "tf-button", disabled: !isHeld, title, onclick: () => this.act.configure(changes), "data-testid": `tf-try-${id}` }, "Switch it on");
  }
}

/** @param {number} at */
const colour = (at) => `background:var(--tf-${["soft", "string", "number", "line-strong"][at % 4]})`;

/** Parts of one time, drawn to scale and told in figures. @param {Bar[]} parts */
function bars(parts) {
  const total = parts.reduce((sum, { us }) => sum + us, 0);
  const time = (/** @type {number} */ us) => formatSeconds(us / 1e6);
  return h(
    "figure",
    { class: "tf-parts", "data-testid": "tf-bars" },
    h("div", { "aria-hidden": "true" }, parts.map(({ us }, at) => h("i", { style: `flex-grow:${us / total};${colour(at)}` }))),
    h("ul", null, parts.map(({ label, us }, at) => h("li", null, h("i", { style: colour(at), "aria-hidden": "true" }), `${label} `, h("b", null, time(us))))),
    h("figcaption", { class: "tf-note" }, `${time(total)} in all, ${parts[0].provenance}`),
  );
}

/** @param {string[]} lookedFor */
function nothing(lookedFor) {
  if (lookedFor.length === 0) return [h("p", { class: "tf-note" }, "This trace was not diagnosed.")];
  return [h("h3", null, "Nothing found"), h("p", { class: "tf-note" }, "What was looked for in this trace:"), h("ul", null, lookedFor.map((text) => h("li", null, text)))];
}
