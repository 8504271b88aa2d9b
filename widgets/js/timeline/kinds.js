// What an event does, by the name of its operator or kernel. No DOM.

/** What an event does, hence its colour; the glyph says it without one. The first rule that fits an operator's name decides. */
export const KINDS = [
  { id: "kernel", colour: "good", label: "fused kernel", glyph: "◆", names: /^fused_|^triton_/ },
  { id: "attention", colour: "twin", label: "attention", glyph: "⌾", names: /attention|flash|fmha/i },
  { id: "matmul", colour: "brand", label: "matmul", glyph: "▦", names: /mm\b|mm_|mma|matmul|linear|convol|einsum|nvjet|cutlass/i },
  { id: "copy", colour: "string", label: "copy", glyph: "⇄", names: /copy|clone|\bcat\b|memcpy|memset|contiguous|\bstack\b|catarray/i },
  { id: "reduction", colour: "number", label: "reduction", glyph: "Σ", names: /sum|mean|softmax|norm|amax|max|min|\bvar|argm|loss|reduce/i },
  { id: "wait", colour: "warn", label: "host waits", glyph: "‖", names: /Synchronize$/ },
  { id: "other", colour: "soft", label: "other", glyph: "·", names: /(?:)/ },
  { id: "idle", colour: "bad", label: "idle", glyph: "▨", names: /(?:)/ },
  { id: "pause", colour: "soft", label: "idle, inherent", glyph: "░", names: /^(launch latency|(start|end) of the window)/ },
];
export const [IDLE, PAUSE] = [KINDS.length - 2, KINDS.length - 1];

/** @param {string} name of an operator or a kernel */
export function kindOf(name) {
  return KINDS.findIndex((kind) => kind.names.test(name));
}
