// The head of the view: what a step takes in a sentence, what to do first, six figures, and what measures them. It has one height.

import { find, h } from "../parts/dom.js";
import { NEEDS_KERNEL } from "../parts/widgets.js";
import { first } from "./first.js";
import { TakeAwayMenu } from "./takeaway.js";
import { ownTime, tiles } from "./tiles.js";

export class VerdictBar {
  /** @param {Act} act @param {(isOn: boolean) => void} measureWhenIdle */
  constructor(act, measureWhenIdle) {
    this.act = act;
    this.said = h("p", { class: "tf-said-line", "data-testid": "tf-sentence" });
    this.first = h("div", { class: "tf-first", role: "group", "aria-label": "what to do first", "data-testid": "tf-first" });
    this.tiles = h("div", { class: "tf-tiles" });
    this.measure = button("Measure", "tf-measure", act.measure);
    this.ablate = button("Measure each pass", "tf-ablate", () => act.ask("timing", { type: "ablate" }));
    this.cancel = button("Cancel", "tf-cancel", () => {
      this.text.textContent = "cancelling…";
      act.ask("timing", { type: "cancel" });
    });
    this.pin = button("", "tf-pin", () => act.ask("passes", { type: this.isPinned ? "unpin" : "pin" }));
    this.isPinned = false;
    this.progress = h("progress", { max: 1, "aria-label": "progress" });
    this.text = h("span", { class: "tf-note", role: "status" });
    this.running = h("div", { class: "tf-running" }, this.progress, this.text);
    this.menu = new TakeAwayMenu(act);
    const actions = h("div", { class: "tf-actions" }, this.measure, this.ablate, this.running, this.cancel, this.pin, this.menu.element);
    this.clock = h("select", { class: "tf-clock", "aria-label": "whose times are shown", "data-testid": "tf-clock", onchange: () => act.ask("passes", { type: "clock", device: this.clock.value }) });
    const idle = h("input", { type: "checkbox", checked: true, onchange: () => measureWhenIdle(idle.checked), "data-testid": "tf-when-idle" });
    /** For programs on a GPU, whose predictions a measurement replaces. */
    this.whenIdle = h("label", { class: "tf-label tf-when-idle", title: "a few seconds after a switch a measurement replaces the prediction, where nothing else runs" }, idle, " measure when idle");
    /** Filled by the shell: that the kernel is lost. */
    this.lost = h("span", { class: "tf-lost" });
    this.lines = h("div", { class: "tf-lines", tabindex: "0", role: "group", "aria-label": "what to know" });
    /** One line of what to know; the shell adds the search. */
    this.know = h("div", { class: "tf-know" }, h("label", { class: "tf-label" }, "times: ", this.clock), this.whenIdle, this.lost, this.lines);
    this.element = h("header", { class: "tf-verdict", "data-testid": "tf-verdict" }, this.said, this.first, h("div", { class: "tf-verdict-row" }, this.tiles, actions), this.know, this.menu.notice);
  }

  /** @param {View} view */
  draw(view) {
    const { payload, status, live } = view;
    const { lead, head } = payload.sentence;
    this.said.replaceChildren(h("b", null, lead), head.slice(lead.length));
    this.said.title = payload.sentence.said;
    this.drawFirst(payload);
    this.tiles.replaceChildren(...tiles(payload, live));
    this.drawClock(payload, live);
    this.whenIdle.hidden = !payload.runs_triton || !live;
    // Where buttons say so only when they are pointed at.
    const saved = live || this.lost.firstChild ? "" : "A saved view: measuring needs a kernel.";
    this.lines.replaceChildren(...lines(payload, status), h("span", { class: "tf-note" }, saved));
    this.lines.title = this.lines.textContent ?? "";
    this.drawActions(payload, status, live);
    this.menu.draw(view);
  }

  /** What leads, and the focus where it was. @param {Payload} payload */
  drawFirst(payload) {
    const focused = this.first.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.testid : null;
    this.first.replaceChildren(...first(payload, this.act));
    if (focused != null) (find(this.first, focused) ?? this.first.querySelector("button"))?.focus({ preventScroll: true });
  }

  /** @param {Payload} payload @param {boolean} live */
  drawClock({ clock }, live) {
    const options = clock.choices.map(([id, label]) => h("option", { value: id, selected: id === clock.chosen }, id === "here" ? label : `modelled on ${label}`));
    this.clock.replaceChildren(...options);
    this.clock.value = clock.chosen;
    this.clock.disabled = !live;
    this.clock.title = live ? `every time in this view; now: ${clock.provenance[1]}` : NEEDS_KERNEL;
  }

  /** @param {Payload} payload @param {Status} status @param {boolean} live */
  drawActions({ timing, blocked, baseline }, status, live) {
    const isRunning = live && status.progress !== null;
    const reason = !live ? NEEDS_KERNEL : blocked;
    this.measure.textContent = timing ? "Measure again" : "Measure";
    this.measure.classList.toggle("tf-primary", !timing || timing.stale);
    enable(this.measure, reason, status.busy !== "" && !isRunning, "replays the traces before and after the passes in turn; your code is not run again");
    enable(this.ablate, reason, status.busy !== "" && !isRunning, "times the step without each pass in turn: what each alone adds");
    this.isPinned = baseline.is_pinned;
    this.pin.textContent = baseline.is_pinned ? "Unpin" : "Pin as baseline";
    enable(this.pin, live ? null : NEEDS_KERNEL, status.busy !== "", baseline.is_pinned ? `compare with the trace as captured again, not with ${baseline.call}` : "compare with this from now on");
    this.showRunning(isRunning, status);
  }

  /** While something is measured, Cancel stands where Measure does, and has its focus. @param {boolean} isRunning @param {Status} status */
  showRunning(isRunning, status) {
    const [shown, hidden] = isRunning ? [[this.running, this.cancel], [this.measure, this.ablate]] : [[this.measure, this.ablate], [this.running, this.cancel]];
    const hadFocus = hidden.some((one) => one === document.activeElement);
    for (const one of shown) one.hidden = false;
    if (hadFocus) (isRunning ? this.cancel : this.measure).focus({ preventScroll: true });
    for (const one of hidden) one.hidden = true;
    if (!isRunning) return;
    this.progress.value = Number(status.progress);
    this.text.textContent = status.text || "measuring…";
    this.text.title = status.text;
  }
}

/** @param {string} label @param {string} id @param {() => void} act */
function button(label, id, act) {
  return h("button", { class: "tf-button", onclick: act, "data-testid": id }, label);
}

/** @param {HTMLButtonElement} button @param {string | null} reason why it cannot be used at all @param {boolean} isBusy @param {string} help */
function enable(button, reason, isBusy, help) {
  button.disabled = reason !== null || isBusy;
  button.title = reason ?? help;
}

/** What stands in the way of measuring, what the figures are against, which step of a loop it is, how far predictions were off, why nothing was measured, all on one line. @param {Payload} payload @param {Status} status */
function lines(payload, status) {
  const { steps, baseline, blocked, clock } = payload;
  const own = ownTime(payload);
  const here = clock.chosen !== "here" && payload.passes.some(({ delta_ms: one }) => one && !one.stale) && clock.choices.find(([id]) => id === "here");
  const record = clock.error === null ? "" : `Predictions here are within ${Math.max(1, Math.round(100 * clock.error))} % (${clock.forecasts} measured later).`;
  return [
    ...(own ? [h("span", { title: payload.timing?.provenance, "data-testid": "tf-own-time" }, `On this CPU${own[1][0] === ":" ? "" : ", measured"}: `, h("b", null, own[0]), own[1])] : []),
    ...(here ? [h("span", { class: "tf-note", "data-testid": "tf-each" }, `Each pass was measured: choose “${here[1]}” in times.`)] : []),
    ...(status.progress === null && status.text ? [h("span", { class: "tf-note", role: "status" }, status.text)] : []),
    ...(blocked ? [h("span", { class: "tf-blocked", role: "status", "data-testid": "tf-blocked" }, blocked)] : []),
    ...(baseline.is_pinned ? [h("span", { class: "tf-baseline", "data-testid": "tf-baseline" }, "⚑ Every “before” is the pinned ", h("code", null, baseline.call))] : []),
    ...(steps ? [h("span", { class: "tf-note tf-steps", title: steps.each, "data-testid": "tf-steps" }, steps.said)] : []),
    ...(record ? [h("span", { class: "tf-note" }, record)] : []),
    // Of a model the list beside it says so.
    ...(clock.kinds[1] === "modelled" ? [] : [h("span", { class: "tf-note" }, `Times ${clock.provenance[1]}.`)]),
  ];
}
