// The view's colours as a canvas takes them.

const PROPERTIES = {
  background: "--tf-bg",
  sunken: "--tf-sunken",
  line: "--tf-line",
  strong: "--tf-line-strong",
  text: "--tf-text",
  soft: "--tf-soft",
  brand: "--tf-brand",
  wash: "--tf-brand-wash",
  on: "--tf-on-brand",
  warn: "--tf-warn",
  kernel: "--tf-good",
  matmul: "--tf-brand",
  attention: "--tf-twin",
  copy: "--tf-string",
  reduction: "--tf-number",
  other: "--tf-soft",
};

/** @typedef {keyof typeof PROPERTIES} Name */
/** @typedef {Record<Name, string>} Colours */

/** What the properties are now: most are light-dark(), which only a computed colour resolves. @param {HTMLElement} probe an element to compute them on @returns {Colours} */
export function palette(probe) {
  const style = getComputedStyle(probe);
  const found = Object.entries(PROPERTIES).map(([name, property]) => {
    probe.style.color = `var(${property})`;
    return [name, style.color];
  });
  return Object.fromEntries(found);
}
