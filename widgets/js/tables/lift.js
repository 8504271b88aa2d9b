// What a click opens is in sight: where the place of the details is not, as below the fold of a notebook, they are lifted over
// the panel, and nothing else moves.

/** Pixels of the details that are in sight at least, where there is room. */
const LEAST = 112;
/** Half a row: what was clicked is not covered. */
const ROW = 16;
/** What moves the view in the window; a resize is the window's own. */
const EVENTS = ["scroll", "resize"];

export class Lift {
  /** @param {HTMLElement} aside @param {HTMLElement} columns what it stays within */
  constructor(aside, columns) {
    this.aside = aside;
    this.columns = columns;
    this.isOpen = false;
    /** Where the last click was. @type {{ x: number, y: number } | null} */
    this.at = null;
    this.onScroll = (/** @type {Event} */ { target }) => this.isOpen && !(target instanceof Node && columns.contains(target)) && this.place();
    for (const name of EVENTS) addEventListener(name, this.onScroll, { capture: true, passive: true });
  }

  destroy() {
    for (const name of EVENTS) removeEventListener(name, this.onScroll, { capture: true });
  }

  /** @param {boolean} isOpen whether there are details */
  draw(isOpen) {
    this.isOpen = isOpen;
    this.place();
  }

  /** Whether they hide a part of the panel. */
  get isLifted() {
    return this.aside.classList.contains("tf-lifted");
  }

  place() {
    const { aside, columns, isOpen } = this;
    aside.style.transform = aside.style.height = "";
    const home = aside.getBoundingClientRect();
    const by = isOpen && home.height > 0 ? this.top(home, columns.getBoundingClientRect()) - home.top : 0;
    aside.classList.toggle("tf-lifted", Math.abs(by) > 1);
    if (Math.abs(by) <= 1) return;
    aside.style.transform = `translateY(${by}px)`;
    // A column beside the panel ends where it did; below it, what is reckoned with is all there is.
    aside.style.height = `${by > 0 ? home.height - by : Math.min(home.height, LEAST)}px`;
  }

  /** Where they are in sight, and beside what was clicked. @param {DOMRect} home @param {DOMRect} columns */
  top(home, columns) {
    const [top, bottom] = inSight(this.columns);
    const height = Math.min(home.height, LEAST);
    const within = (/** @type {number} */ to) => Math.min(columns.bottom - height, Math.max(columns.top, to));
    const to = within(Math.max(top, Math.min(home.top, bottom - height)));
    if (to === home.top || !this.at || this.at.x < home.left || this.at.x > home.right) return to;
    const above = this.at.y - ROW - height;
    const covers = this.at.y > to - ROW && this.at.y < to + height + ROW;
    return covers && above >= Math.max(top, columns.top) ? above : to;
  }
}

/** From where to where an element's surroundings let it be seen, in the window. @param {HTMLElement} element */
function inSight(element) {
  let [top, bottom] = [0, innerHeight];
  // What the page itself hides, the window does.
  for (let around = element.parentElement; around && around !== document.body; around = around.parentElement) {
    if (getComputedStyle(around).overflowY === "visible") continue;
    const box = around.getBoundingClientRect();
    [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
  }
  return [top, bottom];
}
