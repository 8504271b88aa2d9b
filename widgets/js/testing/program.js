// A small program for the tests: a model of three layers, the second of which is the slowest, and a loss outside of it.

/** @param {Partial<Value>} fields */
export const value = (fields) => ({
  op: "aten.mul.Tensor", type: "f32[2, 3]", stride: [3, 1], nbytes: 24, phase: "forward", module: "", module_type: "", source: "", lines: [], reads: [], uses: [],
  twins: [], saved_bytes: 0, removed: false, storage: [], kernel: "", of: "", time_us: [1, 1], ...fields,
});

/** @param {Partial<LayerRow>} fields @returns {LayerRow} */
const row = (fields) => ({ path: "", folded: (fields.path ?? "").replace(/\d/, "*"), module_type: "", forward_ops: [1, 1], backward_ops: [1, 1], update_ops: [0, 0], forward_us: [0, 0], backward_us: [0, 0], update_us: [0, 0], saved_bytes: [0, 0], cause: "", backward_kinds: [{}, {}], flops: [[0, 0], [0, 0]], ...fields });

/** One layer's linear and gelu. @param {number} at @param {number} us of its matmuls in the backward */
function layer(at, us) {
  const module = `h.${at}`;
  return {
    forward: {
      [`mm_${at}`]: value({ op: "aten.mm.default", module: `${module}.up`, module_type: "Linear", source: "gpt.py:4  y = self.up(x)", twins: [`dx_${at}`, `dw_${at}`], saved_bytes: 24, time_us: [2, 2] }),
      [`view_${at}`]: value({ op: "aten.view.default", module: `${module}.up`, module_type: "Linear", source: "gpt.py:4  y = self.up(x)", time_us: [null, null] }),
      [`gelu_${at}`]: value({ op: "aten.gelu.default", module, module_type: "Block", source: "gpt.py:5  return gelu(y)", twins: [`dgelu_${at}`] }),
    },
    backward: {
      [`dgelu_${at}`]: value({ op: "aten.gelu_backward.default", phase: "backward", module, module_type: "Block", source: "gpt.py:5  return gelu(y)", twins: [`gelu_${at}`] }),
      [`dx_${at}`]: value({ op: "aten.mm.default", phase: "backward", module: `${module}.up`, module_type: "Linear", source: "gpt.py:4  y = self.up(x)", twins: [`mm_${at}`], time_us: [us, us] }),
      [`dw_${at}`]: value({ op: "aten.sum.dim_IntList", phase: "backward", module: `${module}.up`, module_type: "Linear", source: "gpt.py:4  y = self.up(x)", twins: [`mm_${at}`] }),
    },
  };
}

/** @returns {any} as much of a payload as the tree needs */
export function program() {
  const layers = [layer(0, 3), layer(1, 7), layer(2, 3)];
  const before = {
    scale: value({ module_type: "GPT", source: "gpt.py:7  x = x * 2", removed: true, time_us: [1, null] }),
    ...Object.assign({}, ...layers.map(({ forward }) => forward)),
    loss: value({ op: "aten.mse_loss.default", type: "f32[]", source: "gpt.py:9  loss = mse(y, t)", twins: ["dloss"], nbytes: 4 }),
    dloss: value({ op: "aten.mse_loss_backward.default", phase: "backward", source: "gpt.py:9  loss = mse(y, t)", twins: ["loss"] }),
    ...Object.assign({}, ...layers.toReversed().map(({ backward }) => backward)),
  };
  // One op that a pass put right after the first one of the second layer.
  const added = value({ op: "fused_mul_9ab", kernel: "fused_mul_9ab", module: "h.1.up", module_type: "Linear", source: "gpt.py:4  y = self.up(x)", time_us: [null, 0.5] });
  const after = Object.keys(before).filter((name) => name !== "scale").flatMap((name) => (name === "mm_1" ? [name, "added"] : [name]));
  const weight = value({ op: "placeholder", of: "h.0.up.weight", time_us: [null, null] });
  return {
    values: { ...before, added, weight, x: value({ op: "placeholder", time_us: [null, null] }) },
    memory: { before: { ops: Object.keys(before) }, after: { ops: after } },
    forward: { lines: [{ kind: "op", value: "scale", diff: "-" }, { kind: "op", value: "added", diff: "+" }, { kind: "op", value: "mm_0", diff: "-" }, { kind: "op", value: "mm_0", diff: "~" }] },
    backward: { lines: [] },
    update: null,
    roots: [],
    unused: { provenance: "modelled", ops: [] },
    layers: [
      row({ module_type: "GPT", forward_us: [1, 0] }),
      ...[3, 7, 3].flatMap((us, at) => [
        row({ path: `h.${at}.up`, module_type: "Linear", forward_us: [2, at === 1 ? 2.5 : 2], backward_us: [us + 1, us + 1], saved_bytes: [24, 24], cause: `matmul ${Math.round((100 * us) / (us + 1))} %`, backward_kinds: [{ matmul: us, reduction: 1 }, { matmul: us, reduction: 1 }], flops: [[8, 16], [8, 16]] }),
        row({ path: `h.${at}`, module_type: "Block", forward_us: [1, 1], backward_us: [1, 1], cause: "pointwise 100 %" }),
      ]),
      row({ path: "h", module_type: "ModuleList" }),
      row({ forward_us: [1, 1], backward_us: [1, 1], cause: "pointwise 100 %" }),
    ],
  };
}
