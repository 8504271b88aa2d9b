// Measuring without a click: a prediction for the GPU that the program runs on is replaced once the reader leaves the view alone.

/** How long nothing was asked for. */
const QUIET_MS = 2500;

export class Background {
  /** @param {() => void} measure */
  constructor(measure) {
    this.measure = measure;
    this.isOn = true;
    this.timer = 0;
    /** Each is measured at most once without a click, whatever came of it. @type {Payload | null} */
    this.asked = null;
  }

  /** Whether a measurement would replace what is shown. @param {View} view */
  wants({ payload, status, live }) {
    const { clock, blocked, runs_triton: runsTriton } = payload;
    const isPredicted = clock.chosen === "here" && clock.kinds[1] === "predicted";
    return this.isOn && live && runsTriton && !blocked && isPredicted && status.busy === "" && payload !== this.asked;
  }

  /** Called whenever anything changed: the time of quiet begins again. @param {View} view */
  consider(view) {
    this.stop();
    if (!this.wants(view)) return;
    this.timer = window.setTimeout(() => {
      this.asked = view.payload;
      this.measure();
    }, QUIET_MS);
  }

  stop() {
    window.clearTimeout(this.timer);
  }
}
