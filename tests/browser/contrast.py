"""The tabs of the view, and what a test asks of a page: which of its texts, and of its legends' swatches, are too close to
what is behind them, and which texts are cut."""

TABS = ("trace", "layers", "graph", "code", "timeline", "memory", "findings", "kernels", "timing", "board", "notes")

# Texts that are too close to what is behind them, by WCAG 2.2's contrast (minimum), level AA.
CONTRAST = """() => {
    const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const known = new Map();
    const rgba = (colour) => {
        if (known.has(colour)) return known.get(colour);
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
        known.set(colour, [r, g, b, a / 255]);
        return known.get(colour);
    };
    const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const light = (colour) => {
        const [r, g, b] = colour.map((one) => linear(one / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (one) => {
        const chain = [];
        for (let at = one; at; at = at.parentElement) chain.push(rgba(getComputedStyle(at).backgroundColor));
        return chain.reverse().reduce((below, colour) => over(colour, below), [255, 255, 255, 1]);
    };
    const problems = [];
    const root = document.querySelector("[data-testid=tf-root]");
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    let count = 0;
    while (walk.nextNode()) {
        const text = walk.currentNode.data.trim();
        const one = walk.currentNode.parentElement;
        if (!text || !one.checkVisibility() || one.closest("style, option, :disabled, [aria-disabled=true]")) continue;
        count += 1;
        const style = getComputedStyle(one);
        const back = behind(one);
        const [a, b] = [light(over(rgba(style.color), back)), light(back)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        const size = parseFloat(style.fontSize);
        const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
        if (ratio < least) problems.push(`${text.slice(0, 40)} (${one.className}): ${ratio.toFixed(2)}`);
    }
    return [count, [...new Set(problems)]];
}"""

# Every swatch of a legend that is on the screen, with the contrast of what is seen best of it: WCAG 2.2 asks for 3 (non-text).
SWATCHES = """() => {
    const rgb = (colour) => colour.match(/[\\d.]+/g).slice(0, 4).map(Number);
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const contrast = (one, other) => {
        const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    };
    const behind = (one) => {
        for (let at = one.parentElement; at; at = at.parentElement) {
            const found = rgb(getComputedStyle(at).backgroundColor);
            if (found[3] !== 0) return found;
        }
        return [255, 255, 255];
    };
    const swatches = document.querySelectorAll(
        ".tf-purpose i, .tf-kind i, .tf-work-legend b, .tf-parts li i, .tf-graph-swatch");
    return [...swatches].filter((one) => one.checkVisibility()).map((one) => {
        const style = getComputedStyle(one);
        const drawn = [style.backgroundColor];
        if (style.outlineStyle !== "none") drawn.push(style.outlineColor);
        if (style.borderTopWidth !== "0px") drawn.push(style.borderTopColor);
        const [back, by] = [behind(one), Number(style.opacity)];
        const seen = drawn.map(rgb).filter((colour) => colour[3] !== 0);
        const mixed = seen.map((colour) => [0, 1, 2].map((at) => by * colour[at] + (1 - by) * back[at]));
        return [one.className, Math.max(0, ...mixed.map((colour) => contrast(colour, back)))];
    });
}"""

# Texts that end at an edge which hides the rest, where neither a title says them nor a click unfolds them, as in code.
CUT = """() => {
    const problems = [];
    for (const one of document.querySelectorAll("[data-testid=tf-root] *")) {
        const isOther = one.closest(".tf-code, .tf-spoken, [aria-hidden=true]");
        const isSeen = one.checkVisibility({ visibilityProperty: true }) && !isOther;
        const texts = [...one.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
        if (!isSeen || texts.length === 0) continue;
        let edge = one;
        while (edge && getComputedStyle(edge).overflowX === "visible") edge = edge.parentElement;
        if (!edge || !["hidden", "clip"].includes(getComputedStyle(edge).overflowX)) continue;
        const range = document.createRange();
        range.selectNodeContents(one);
        if (range.getBoundingClientRect().right <= edge.getBoundingClientRect().right + 1) continue;
        if (!one.closest("[title]:not([title=''])")) problems.push(`${one.textContent.slice(0, 60)} (${one.className})`);
    }
    return [...new Set(problems)];
}"""
