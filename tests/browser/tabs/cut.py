"""What a test asks of a page's words at a width: which of them are cut and say nowhere what is missing, and which overlap."""

# Words that are cut: by an edge without "…", without a title that has them whole, or at the end of what scrolls sideways,
# where that is neither code nor a drawing. Each with what cuts it.
CUT = """() => {
    const root = document.querySelector("[data-testid=tf-root]");
    const found = new Set();
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    while (walk.nextNode()) {
        const one = walk.currentNode.parentElement;
        const text = walk.currentNode.data.trim();
        if (!text || !one.checkVisibility({ visibilityProperty: true })) continue;
        if (one.closest("style, option, pre, .tf-code, .tf-spoken, .tf-graph-live, .tf-notice")) continue;
        range.selectNodeContents(walk.currentNode);
        const { left, right, width } = range.getBoundingClientRect();
        if (width < 1) continue;
        for (let at = one; at !== root.parentElement; at = at.parentElement) {
            const style = getComputedStyle(at);
            if (style.overflowX === "visible" || style.display === "inline") continue;
            const box = at.getBoundingClientRect();
            if (left > box.left - 1.5 && right < box.right + 1.5) continue;
            const isShort = style.textOverflow === "ellipsis" && !/flex|grid/.test(style.display);
            const isTold = isShort && one.closest("[title]:not([title=''])") !== null;
            const why = isTold ? "" : isShort ? "no title" : style.overflowX;
            if (why) found.add(`${text.slice(0, 40)} | ${one.className} | cut by ${at.className}: ${why}`);
            break;
        }
    }
    return [...found];
}"""

# Controls and headings that lie over one another by more than a pixel, unless one is inside the other.
OVERLAPPING = """() => {
    const root = document.querySelector("[data-testid=tf-root]");
    const controls = "button, select, input, th, [role=columnheader], label";
    const drawn = "dialog, .tf-stage, .tf-plot, .tf-tree-space";
    const isSeen = (one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(drawn);
    const seen = [...root.querySelectorAll(controls)].filter(isSeen).map((one) => [one, one.getBoundingClientRect()]);
    const boxes = seen.filter(([, { width, height }]) => width > 1 && height > 1);
    const name = (one) => `${one.textContent.trim().slice(0, 30)} | ${one.className}`;
    const found = [];
    for (const [at, [one, a]] of boxes.entries()) {
        for (const [other, b] of boxes.slice(at + 1)) {
            if (one.contains(other) || other.contains(one)) continue;
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (wide <= 1 || high <= 1) continue;
            const scrolls = [one, other].map((each) => each.closest(".tf-side, .tf-tab-body, .tf-aside"));
            if (scrolls[0] !== scrolls[1]) continue;
            found.push(`${name(one)} over ${name(other)}`);
        }
    }
    return found;
}"""

# Tabs that are not wholly inside their strip, or the page.
HIDDEN_TABS = """() => {
    const strip = document.querySelector(".tf-tabs").getBoundingClientRect();
    const right = Math.min(strip.right, innerWidth);
    const isWhole = (box) => box.left >= strip.left - 1 && box.right <= right + 1 && box.bottom <= strip.bottom + 1;
    const tabs = [...document.querySelectorAll("[role=tab]")];
    return tabs.filter((one) => !isWhole(one.getBoundingClientRect())).map((one) => one.textContent);
}"""
