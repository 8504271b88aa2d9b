function s(e,t,...a){let n=document.createElement(e);for(let[r,o]of Object.entries(t??{}))o==null||o===!1||(typeof o=="function"||r==="value"||r==="checked"||r==="disabled"?n[r]=o:n.setAttribute(r,o===!0?"":String(o)));for(let r of a.flat())r==null||r===!1||n.append(r instanceof Node?r:String(r));return n}function d(e){let t=e<0?"−":"",a=Math.abs(e);for(let n of["B","KiB","MiB"]){if(a<1024)return`${t}${w(a)} ${n}`;a/=1024}return`${t}${w(a)} GiB`}function w(e){if(e===0)return"0";let t=Math.max(0,2-Math.floor(Math.log10(Math.abs(e))));return e.toFixed(Math.min(t,3)).replace(/(\.\d*?)0+$/,"$1").replace(/\.$/,"")}function p(e){return e===0?"0":e.toFixed(Math.min(4,Math.max(0,2-Math.floor(Math.log10(Math.abs(e))))))}function B(e){return e<1?`${w(e*1e3)} ms`:`${w(e)} s`}function L(e,t){if(!e)return"";let a=Math.round(100*(t-e)/e);return a===0?e===t?"unchanged":"±0 %":`${a<0?"−":"+"}${Math.abs(a)} %`}function y(e){return e===0?"±0":e<0?`−${-e}`:`+${e}`}function c(e,t,a){return`${e} ${e===1?t:a??t+"s"}`}var $=100,Y={" ":"","+":"+","-":"−","~":"~"},X=/("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(torch\.ops\.\w+\.\w+(?:\.\w+)?)|([A-Za-z_]\w*)|(\d[\w.]*(?:e-?\d+)?)/g,Z=new Set(["def","return","del","None","True","False","import","from","as"]),x=class{constructor(t,a){this.act=a,this.tokens=new Map,this.rows=new Map,this.kernels=new Set,this.count=s("span",{class:"tf-note"}),this.changes=s("span",{class:"tf-changes"}),this.body=s("div",{class:"tf-code",tabindex:"0",role:"group","aria-label":`${t} trace`,"data-testid":`tf-code-${t.toLowerCase()}`}),this.body.addEventListener("click",n=>this.onClick(n)),this.body.addEventListener("keydown",n=>this.onKey(n)),this.inputsOpen=!1,this.element=s("section",{class:"tf-pane"},s("div",{class:"tf-pane-head"},s("h3",null,t),this.count,this.changes),this.body)}show(t,a,n,r){this.kernels=n,this.tokens.clear(),this.rows.clear();let o=r?t.lines:t.lines.filter(l=>l.diff!=="-"),i=l=>l.map(g=>this.row(g,a,r)),f=o.filter(l=>l.kind!=="input"&&l.kind!=="signature"),u=[];for(let l=0;l<f.length;l+=$){let g=s("div",{class:"tf-chunk"},i(f.slice(l,l+$)));g.style.containIntrinsicHeight=`auto ${18*$}px`,u.push(g)}let b=o.filter(l=>l.kind==="input");this.body.replaceChildren(...i(o.filter(l=>l.kind==="signature")),this.inputs(b,i(b),r),...u);let[m,h]=t.ops;this.count.textContent=m===h?`${h} ops`:`${m} → ${h} ops`,this.changes.replaceChildren(...t.added?[s("span",{class:"tf-plus"},`+${t.added}`)]:[],...t.removed?[s("span",{class:"tf-minus"},`−${t.removed}`)]:[]),this.changes.title=`lines against the unoptimised trace; ${y(h-m)} ops`}inputs(t,a,n){let r=f=>t.filter(u=>u.diff===f).length,[o,i]=[r("+"),r("-")];return s("details",{class:"tf-inputs",open:this.inputsOpen,ontoggle:f=>this.inputsOpen=f.target.open},s("summary",null,c(t.length-i,"input"),n&&o>0&&s("span",{class:"tf-plus"},` +${o}`),n&&i>0&&s("span",{class:"tf-minus"},` −${i}`)),s("div",{class:"tf-chunk"},a))}row(t,a,n){let r=n?t.diff:" ",o=`tf-line tf-is-${t.kind}${r==="-"?" tf-del":r==="+"?" tf-add":r==="~"?" tf-mod":""}`,i=s("div",{class:o,"data-defines":t.value||null},s("span",{class:"tf-glyph","aria-label":{"+":"added","-":"removed","~":"changed"}[r.trim()]},Y[r]),s("code",null,...this.paint(t.code,a),t.comment&&s("span",{class:"tf-type"},(t.code.trim()?"  ":"")+t.comment)));return t.value&&(t.diff!=="-"||!this.rows.has(t.value))&&this.rows.set(t.value,i),i}paint(t,a){let n=[],r=0;for(let o of t.matchAll(X)){let[i,f,u,b,m]=o,h=f?"string":u?"op":m?"number":Z.has(i)?"keyword":"",l=!!b&&this.kernels.has(i),g=!!b&&!l&&Object.hasOwn(a,i);!h&&!g&&!l||(n.push(t.slice(r,o.index)),n.push(g?this.token(i):l?tt(i):u?Q(i):s("span",{class:`tf-${h}`},i)),r=o.index+i.length)}return n.push(t.slice(r)),n}token(t){let a=s("span",{class:"tf-value","data-value":t},t),n=this.tokens.get(t);return n?n.push(a):this.tokens.set(t,[a]),a}highlight(t,a){for(let i of this.body.querySelectorAll(".tf-selected, .tf-current, .tf-twin"))i.classList.remove("tf-selected","tf-current","tf-twin");if(!t)return;for(let i of this.tokens.get(t)??[])i.classList.add("tf-selected");this.rows.get(t)?.classList.add("tf-current");for(let i of a)this.rows.get(i)?.classList.add("tf-twin");let n=this.rows.get(t),r=a.map(i=>this.rows.get(i)).find(Boolean),o=n?.classList.contains("tf-is-op")?n:r??n??this.tokens.get(t)?.[0];o&&(o.closest("details")?.setAttribute("open",""),this.reveal(o),requestAnimationFrame(()=>this.reveal(o)))}reveal(t){let a=this.body.getBoundingClientRect(),n=t.getBoundingClientRect();n.top>=a.top&&n.bottom<=a.bottom||(this.body.scrollTop+=n.top-a.top-a.height/3)}onClick(t){let a=t.target,n=a.closest("[data-kernel]");if(n)return this.act.openKernel(n.dataset.kernel);let r=a.closest("[data-value]"),o=a.closest("[data-defines]"),i=r?.dataset.value??o?.dataset.defines;i?this.act.select(i):a.closest(".tf-is-signature, .tf-is-return, .tf-is-free")?.classList.toggle("tf-unfolded")}onKey(t){if(t.key==="Escape")return this.act.select("");let a=t.key==="ArrowDown"?1:t.key==="ArrowUp"?-1:0;if(!a||this.rows.size===0)return;t.preventDefault(),t.stopPropagation();let n=[...this.rows].filter(([,i])=>!i.closest("details:not([open])")).map(([i])=>i),r=n.findIndex(i=>this.rows.get(i)?.classList.contains("tf-current")),o=r<0?a>0?0:n.length-1:Math.min(n.length-1,Math.max(0,r+a));this.act.select(n[o])}};function Q(e){let t="torch.ops.";return s("span",{class:"tf-op",title:e},s("span",{class:"tf-prefix"},t),e.slice(t.length))}function tt(e){return s("span",{class:"tf-kernel","data-kernel":e,title:"show the Triton source"},e)}var S=[[1,"1: full size"],[.5,"½: half"],[0,"0: free"]],et=.5,O=8,st=40;function N(e,t,a,n){let r=t.error?.panel==="passes"?t.error.message:null;return s("section",{class:"tf-passes","aria-label":"Passes","aria-busy":String(t.busy==="passes")},s("h3",null,"Passes"),e.passes.map(o=>at(o,e.config,a,n)),r&&s("p",{class:"tf-error",role:"alert","data-testid":"tf-error-passes"},r),ct(e.call))}function at(e,t,a,n){let r=`tf-${e.name}-${Math.random().toString(36).slice(2,8)}`;return s("div",{class:`tf-pass${e.enabled?"":" tf-off"}`,"data-testid":`tf-pass-${e.name}`},s("div",{class:"tf-pass-head"},s("input",{type:"checkbox",role:"switch",id:r,class:"tf-switch",checked:e.enabled,onchange:()=>n.configure({[e.name]:nt(e)}),"data-testid":`tf-toggle-${e.name}`}),s("label",{for:r,title:e.help},e.name),e.seconds!==null&&s("span",{class:"tf-note tf-seconds",title:"how long the pass itself took"},B(e.seconds))),e.enabled&&ot(e,t,n),s("div",{class:"tf-effect"},rt(e)),e.error&&s("p",{class:"tf-error",role:"alert"},e.error),e.enabled&&e.decisions.length>0&&ft(e,a,n))}function nt(e){return e.name==="freeze"?e.enabled?null:[]:e.name==="remat"?e.enabled?null:et:!e.enabled}function rt(e){if(!e.enabled)return[s("span",{class:"tf-note"},"off")];if(!e.ops||!e.saved_bytes)return[];let t=e.ops[1]-e.ops[0],a=e.saved_bytes[1]-e.saved_bytes[0];return t===0&&a===0?[s("span",{class:"tf-note"},"same size")]:[t!==0&&s("span",{class:t<0?"tf-gain":"tf-cost"},`${y(t)} ops`),a!==0&&s("span",{class:a<0?"tf-gain":"tf-cost"},`${a>0?"+":""}${d(a)} saved`)].filter(n=>n!==!1)}function ot(e,t,a){return e.name==="remat"?it(t,a):e.name==="freeze"?lt(t,a):null}function it(e,t){let n=S.some(([r])=>r===e.remat)?S:[...S,[e.remat,String(e.remat)]];return s("label",{class:"tf-option",title:"how much a saved value counts that its producer's region reads anyway"},"input weight",s("select",{onchange:r=>t.configure({remat:Number(r.target.value)}),"data-testid":"tf-remat-weight"},n.map(([r,o])=>s("option",{value:String(r),selected:r===e.remat},o))))}function lt(e,t){let a=(e.freeze??[]).join(", ");return s("label",{class:"tf-option",title:"names or globs of parameters whose gradients nobody wants, separated by commas"},"names",s("input",{type:"text",value:a,placeholder:"h.*.mlp.*",spellcheck:"false",onchange:r=>t.configure({freeze:r.target.value.split(",").map(o=>o.trim()).filter(Boolean)}),"data-testid":"tf-freeze"}))}function ft(e,t,a){let n=e.decisions.slice(0,st),r=e.decisions.length-n.length,o=e.decisions.reduce((i,f)=>i+f.values.length,0);return s("details",{class:"tf-reasons",open:t.has(e.name),ontoggle:i=>i.target.open?t.add(e.name):t.delete(e.name)},s("summary",{"data-testid":`tf-reasons-${e.name}`},c(o,"decision")),s("ul",null,n.map(i=>dt(i,a))),r>0&&s("p",{class:"tf-note"},`and ${c(r,"more reason")}: \`print(c.steps)\` has all`))}function dt(e,t){let a=e.values.length-O;return s("li",null,s("span",{class:"tf-action"},e.action,e.values.length>1&&` × ${e.values.length}`),e.nbytes>0&&s("span",{class:"tf-note"},` ${d(e.nbytes)}`),s("span",{class:"tf-why"},e.reason),s("span",{class:"tf-chips"},e.values.slice(0,O).map(n=>z(n,t)),a>0&&s("span",{class:"tf-note"},`+${a}`)))}function z(e,t){return s("button",{class:"tf-chip",onclick:()=>t.select(e)},e)}function ct(e){let t=s("button",{class:"tf-chip",title:"copy"},"copy");return t.onclick=()=>M(e,t),s("div",{class:"tf-call"},s("span",{class:"tf-label"},"In Python"),s("code",{"data-testid":"tf-call"},e),t)}async function M(e,t){try{await navigator.clipboard.writeText(e),t.textContent="copied"}catch{t.textContent="select the text and press Ctrl+C"}setTimeout(()=>t.textContent="copy",1500)}var A=12;function E(e,t,a){let n=t.values[e],r={class:"tf-details","data-testid":"tf-details","aria-live":"polite"};return n?s("div",r,s("div",{class:"tf-facts"},s("b",{class:"tf-name"},e),s("code",null,n.type),s("span",null,d(n.nbytes)),s("span",null,n.op),s("span",{class:"tf-note"},n.phase),n.saved&&s("span",{class:"tf-badge"},"saved for backward"),n.removed&&s("span",{class:"tf-badge"},"removed by a pass"),s("button",{class:"tf-chip tf-close","aria-label":"clear the selection",onclick:()=>a.select("")},"×")),n.source&&k("line",s("code",{class:"tf-source"},n.source)),n.module&&k("module",s("code",null,n.module)),T("reads",n.reads,a),T("read by",n.uses,a),T(n.phase==="forward"?"backward twin":"forward twin",n.twins,a),...pt(e,t)):s("div",r,s("span",{class:"tf-note"},"Click a value, or walk with ↑ ↓, to see who reads it and what was decided about it."))}function k(e,...t){return s("div",{class:"tf-fact"},s("span",{class:"tf-label"},e),s("span",{class:"tf-chips"},...t))}function T(e,t,a){if(t.length===0)return null;let n=t.length-A;return k(e,...t.slice(0,A).map(r=>z(r,a)),n>0?s("span",{class:"tf-note"},`+${n}`):"")}function pt(e,t){return t.passes.flatMap(a=>a.decisions.filter(n=>n.values.includes(e)).map(n=>k(a.name,s("span",null,s("span",{class:"tf-action"},n.action),` ${n.reason}`))))}var F=`/* Colours come from JupyterLab's theme where there is one; light-dark() has the page's own for the rest. */
.tf {
  color-scheme: light dark;
  --tf-bg: var(--jp-layout-color0, light-dark(#ffffff, #14161a));
  --tf-raised: var(--jp-layout-color1, light-dark(#ffffff, #191c21));
  --tf-sunken: var(--jp-layout-color2, light-dark(#f4f5f7, #22262d));
  --tf-line: light-dark(#e2e5ea, #31363f);
  --tf-line-strong: light-dark(#c6cbd3, #4a515d);
  --tf-text: light-dark(#1b1f26, #e4e7ec);
  --tf-soft: light-dark(#5b6472, #a0a9b7);
  --tf-faint: light-dark(#767f8d, #858f9e);
  --tf-brand: light-dark(#1f5fd0, #7fb0ff);
  --tf-on-brand: light-dark(#ffffff, #0e1420);
  --tf-brand-wash: light-dark(#e6eefc, #203150);
  --tf-good: light-dark(#14703f, #67d197);
  --tf-good-wash: light-dark(#e4f5ea, #173324);
  --tf-bad: light-dark(#b3261e, #ff9a90);
  --tf-bad-wash: light-dark(#fdeceb, #40211f);
  --tf-warn: light-dark(#8a5300, #f0bd6a);
  --tf-warn-wash: light-dark(#fff3dd, #3a2d14);
  --tf-twin-wash: light-dark(#f3ecfd, #32264a);
  --tf-twin: light-dark(#6b3fb5, #c3a4fb);
  --tf-string: light-dark(#9a3b12, #f0a880);
  --tf-number: light-dark(#0b6a78, #79cfdc);
  --tf-mono: var(--jp-code-font-family, ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace);
  container-type: inline-size;
  color: var(--tf-text);
  font: 13px/1.45 var(--jp-ui-font-family, system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif);
  min-width: 0;
}
[data-jp-theme-light="true"] .tf, .vscode-light .tf { color-scheme: light; }
[data-jp-theme-light="false"] .tf, .vscode-dark .tf { color-scheme: dark; }

.tf, .tf * { box-sizing: border-box; }
.tf [hidden] { display: none; }
.tf-frame { background: var(--tf-bg); border: 1px solid var(--tf-line); border-radius: 10px; overflow: hidden; }
.tf h3 { margin: 0; font-size: 13px; font-weight: 600; color: var(--tf-text); }
.tf p { margin: 6px 0 0; }
.tf code, .tf pre { font-family: var(--tf-mono); font-size: 12px; color: inherit; background: none; padding: 0; }
.tf button, .tf input, .tf select { font: inherit; color: inherit; margin: 0; }
.tf :focus-visible { outline: 2px solid var(--tf-brand); outline-offset: 1px; }
.tf small { font-size: 11px; }

.tf-label { font-size: 11px; color: var(--tf-soft); }
.tf-note { color: var(--tf-faint); font-size: 12px; }
.tf-error { color: var(--tf-bad); background: var(--tf-bad-wash); border-radius: 6px; padding: 6px 8px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; }
.tf-warn { color: var(--tf-warn); background: var(--tf-warn-wash); border-radius: 6px; padding: 6px 8px; font-size: 12px; }
.tf-badge { background: var(--tf-brand-wash); color: var(--tf-brand); border-radius: 4px; padding: 0 6px; font-size: 12px; }

/* verdict */
.tf-verdict { display: flex; flex-wrap: wrap; align-items: stretch; border-bottom: 1px solid var(--tf-line); background: var(--tf-raised); }
.tf-tile { display: flex; flex-direction: column; gap: 2px; padding: 12px 20px 12px 16px; border-right: 1px solid var(--tf-line); min-width: 132px; }
.tf-figure { display: flex; align-items: baseline; gap: 6px; font-size: 19px; line-height: 1.3; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tf-figure b { font-weight: 600; }
.tf-was { color: var(--tf-faint); font-weight: 400; font-size: 15px; }
.tf-arrow { color: var(--tf-faint); font-size: 13px; }
.tf-unit { font-size: 13px; color: var(--tf-soft); }
.tf-below { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 8px; }
.tf-pill { align-self: flex-start; font-size: 12px; font-variant-numeric: tabular-nums; border-radius: 4px; padding: 0 6px; background: var(--tf-sunken); color: var(--tf-soft); }
.tf-better { background: var(--tf-good-wash); color: var(--tf-good); }
.tf-worse { background: var(--tf-bad-wash); color: var(--tf-bad); }
.tf-tile.tf-stale .tf-figure, .tf-tile.tf-stale .tf-pill, .tf-stale .tf-table { opacity: .5; }
.tf-measure { display: flex; flex-direction: column; justify-content: center; align-items: flex-end; gap: 4px; margin-left: auto; padding: 10px 16px; min-width: 120px; }
.tf-measure progress { width: 110px; height: 4px; accent-color: var(--tf-brand); }
.tf-static { margin-left: auto; align-self: center; padding: 0 16px; color: var(--tf-faint); font-size: 12px; }
.tf-button { border: 1px solid var(--tf-line-strong); background: var(--tf-raised); border-radius: 6px; padding: 5px 14px; cursor: pointer; font-weight: 500; white-space: nowrap; }
.tf-button:hover:enabled { border-color: var(--tf-brand); color: var(--tf-brand); }
.tf-button.tf-primary { background: var(--tf-brand); border-color: var(--tf-brand); color: var(--tf-on-brand); }
.tf-button.tf-primary:hover:enabled { color: var(--tf-on-brand); filter: brightness(1.08); }
.tf-button:disabled { opacity: .55; cursor: default; }

/* passes */
.tf-columns { display: grid; grid-template-columns: 232px minmax(0, 1fr); }
.tf-side { border-right: 1px solid var(--tf-line); background: var(--tf-raised); min-width: 0; }
.tf-passes { padding: 10px 14px 14px; }
.tf[data-busy="passes"] .tf-passes h3::after { content: "updating…"; margin-left: 8px; font-weight: 400; font-size: 12px; color: var(--tf-brand); }
.tf-pass { padding: 10px 0; border-bottom: 1px solid var(--tf-line); }
.tf-pass-head { display: flex; align-items: center; gap: 8px; }
.tf-pass-head label { font-family: var(--tf-mono); font-size: 13px; font-weight: 600; cursor: pointer; flex: 1; }
.tf-off label { color: var(--tf-faint); font-weight: 400; }
.tf-seconds { font-size: 11px; font-variant-numeric: tabular-nums; }
.tf-effect { display: flex; flex-wrap: wrap; gap: 2px 10px; padding-left: 36px; font-size: 12px; font-variant-numeric: tabular-nums; }
.tf-gain { color: var(--tf-good); }
.tf-cost { color: var(--tf-warn); }
.tf-switch { appearance: none; position: relative; flex: none; width: 28px; height: 16px; border-radius: 8px; background: var(--tf-line-strong); cursor: pointer; transition: background .12s; }
.tf-switch::after { content: ""; position: absolute; top: 2px; left: 2px; width: 12px; height: 12px; border-radius: 50%; background: light-dark(#fff, #14161a); transition: transform .12s; }
.tf-switch:checked { background: var(--tf-brand); }
.tf-switch:checked::after { transform: translateX(12px); }
@media (prefers-reduced-motion: reduce) { .tf-switch, .tf-switch::after { transition: none; } }
.tf-option { display: flex; align-items: center; gap: 8px; padding: 4px 0 2px 36px; font-size: 12px; color: var(--tf-soft); }
.tf-option input, .tf-option select { flex: 1; min-width: 0; height: 24px; padding: 0 6px; border: 1px solid var(--tf-line-strong); border-radius: 5px; background: var(--tf-bg); color: var(--tf-text); font-size: 12px; }
.tf-option input { font-family: var(--tf-mono); font-size: 11px; }
.tf-option input::placeholder { color: var(--tf-faint); opacity: 1; }
.tf-reasons { padding-left: 36px; font-size: 12px; }
.tf-reasons summary { cursor: pointer; color: var(--tf-soft); margin-left: -1px; }
.tf-reasons summary:hover { color: var(--tf-brand); }
.tf-reasons ul { list-style: none; margin: 4px 0 0 -36px; padding: 0; max-height: 260px; overflow: auto; }
.tf-reasons li { display: block; padding: 6px 0; border-top: 1px dashed var(--tf-line); }
.tf-action { font-weight: 600; }
.tf-why { display: block; color: var(--tf-soft); overflow-wrap: anywhere; }
.tf-chips { display: flex; flex-wrap: wrap; align-items: baseline; gap: 3px 4px; min-width: 0; }
.tf-chip { border: 1px solid var(--tf-line); background: var(--tf-sunken); border-radius: 4px; padding: 0 5px; font-family: var(--tf-mono) !important; font-size: 11px !important; line-height: 17px; cursor: pointer; max-width: 100%; overflow: hidden; text-overflow: ellipsis; }
.tf-chip:hover { border-color: var(--tf-brand); color: var(--tf-brand); }
.tf-call { padding-top: 12px; display: flex; flex-wrap: wrap; align-items: center; gap: 2px 8px; }
.tf-call .tf-label { flex: 1; }
.tf-call code { order: 3; width: 100%; padding: 5px 7px; background: var(--tf-sunken); border-radius: 5px; overflow-wrap: anywhere; user-select: all; }

/* code */
.tf-main { min-width: 0; display: flex; flex-direction: column; }
.tf-toolbar { display: flex; justify-content: space-between; gap: 12px; padding: 7px 14px; border-bottom: 1px solid var(--tf-line); }
.tf-toolbar label { display: inline-flex; align-items: center; gap: 6px; font-size: 12px; color: var(--tf-soft); cursor: pointer; }
.tf-toolbar input { accent-color: var(--tf-brand); }
.tf-panes { flex: 1; display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
.tf-pane { min-width: 0; display: flex; flex-direction: column; }
.tf-pane + .tf-pane { border-left: 1px solid var(--tf-line); }
.tf-pane-head { display: flex; align-items: baseline; gap: 10px; padding: 7px 14px; background: var(--tf-raised); border-bottom: 1px solid var(--tf-line); }
.tf-changes { margin-left: auto; display: flex; gap: 8px; font: 600 12px var(--tf-mono); }
.tf-plus { color: var(--tf-good); }
.tf-minus { color: var(--tf-bad); }
.tf-code { flex: 1 0 auto; height: 440px; min-height: 160px; overflow: auto; resize: vertical; padding: 6px 0; line-height: 18px; tab-size: 4; }
.tf-code:focus-visible { outline-offset: -2px; }
.tf-chunk { content-visibility: auto; width: max-content; min-width: 100%; }
.tf-code { overflow-anchor: none; }
.tf-line { display: flex; height: 18px; line-height: 18px; padding-right: 16px; border-left: 2px solid transparent; }
.tf-line[data-defines] { cursor: pointer; }
.tf-line[data-defines]:hover { background: var(--tf-sunken); }
.tf-line code { white-space: pre; line-height: 18px; display: block; }
.tf-glyph { flex: none; width: 20px; text-align: center; font: 600 12px/18px var(--tf-mono); user-select: none; }
.tf-add { background: var(--tf-good-wash); }
.tf-add .tf-glyph { color: var(--tf-good); }
.tf-del { background: var(--tf-bad-wash); }
.tf-del .tf-glyph { color: var(--tf-bad); }
.tf-del code { opacity: .8; }
.tf-mod { background: var(--tf-warn-wash); }
.tf-mod .tf-glyph { color: var(--tf-warn); }
.tf-type { color: var(--tf-faint); }
.tf-is-group code, .tf-is-comment code { color: var(--tf-soft); }
.tf-is-group .tf-type { color: var(--tf-soft); }
.tf-is-input .tf-type { padding-left: 4ch; }
.tf-is-free code { color: var(--tf-faint); }
.tf-code { container-type: inline-size; }
.tf-is-signature, .tf-is-return, .tf-is-free { max-width: 100cqi; cursor: pointer; }
.tf-is-signature code, .tf-is-return code, .tf-is-free code { overflow: hidden; text-overflow: ellipsis; min-width: 0; }
.tf-unfolded { height: auto; }
.tf-unfolded code { white-space: pre-wrap !important; overflow-wrap: anywhere; }
.tf-inputs summary { padding-left: calc(22px + 4ch); cursor: pointer; color: var(--tf-soft); font: 12px/18px var(--tf-mono); }
.tf-inputs summary:hover { color: var(--tf-brand); }
.tf-is-blank { height: 8px; }
.tf-prefix { font-size: 0; }
.tf-keyword { color: var(--tf-twin); }
.tf-op { color: var(--tf-brand); }
.tf-kernel { color: var(--tf-good); cursor: pointer; text-decoration: underline dotted; text-underline-offset: 3px; }
.tf-string { color: var(--tf-string); }
.tf-number { color: var(--tf-number); }
.tf-value { border-radius: 3px; cursor: pointer; }
.tf-value:hover { text-decoration: underline; text-underline-offset: 2px; }
.tf-line.tf-current { border-left-color: var(--tf-brand); background: var(--tf-brand-wash); }
.tf-line.tf-twin { border-left-color: var(--tf-twin); background: var(--tf-twin-wash); }
.tf-value.tf-selected { background: var(--tf-brand); color: var(--tf-on-brand); padding: 0 2px; margin: 0 -2px; }

/* details */
.tf-details { border-top: 1px solid var(--tf-line); padding: 8px 14px; min-height: 37px; max-height: 220px; overflow: auto; background: var(--tf-raised); }
.tf-facts { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 14px; font-size: 12px; }
.tf-name { font-family: var(--tf-mono); font-size: 13px; overflow-wrap: anywhere; }
.tf-close { margin-left: auto; }
.tf-fact { display: grid; grid-template-columns: 92px minmax(0, 1fr); gap: 8px; align-items: baseline; padding-top: 4px; font-size: 12px; }
.tf-source { overflow-wrap: anywhere; }

/* tables */
.tf-tables { border-top: 1px solid var(--tf-line); }
.tf-tabs { display: flex; gap: 4px; padding: 0 10px; border-bottom: 1px solid var(--tf-line); background: var(--tf-raised); }
.tf-tabs button { border: 0; background: none; padding: 8px 8px 6px; border-bottom: 2px solid transparent; cursor: pointer; color: var(--tf-soft); }
.tf-tabs button:hover { color: var(--tf-text); }
.tf-tabs button[aria-selected="true"] { color: var(--tf-text); font-weight: 600; border-bottom-color: var(--tf-brand); }
.tf-tab-body { padding: 10px 16px 14px; max-height: 420px; overflow: auto; }
.tf-table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; max-width: 1280px; }
.tf-table th, .tf-table td { padding: 5px 16px 5px 0; text-align: left; vertical-align: baseline; border: 0; border-bottom: 1px solid var(--tf-line); font-weight: 400; background: none; white-space: nowrap; }
.tf-table thead th { color: var(--tf-soft); font-size: 12px; }
.tf-table tbody tr:last-child > * { border-bottom: 0; }
.tf-table tr, .tf-table tr:hover { background: none !important; }
.tf-table .tf-right { text-align: right; }
.tf-bars { width: 34%; min-width: 120px; vertical-align: middle !important; }
.tf-bar { position: relative; height: 5px; margin: 2px 0; }
.tf-bar b { position: absolute; inset: 0 auto 0 0; border-radius: 2px; background: var(--tf-line-strong); }
.tf-bar-is b { background: var(--tf-brand); }
.tf-bar i { position: absolute; top: -1px; bottom: -1px; min-width: 1px; border-inline: 1px solid var(--tf-text); background: color-mix(in srgb, var(--tf-text) 35%, transparent); }
.tf-disclose { border: 0; background: none; padding: 0; font-family: var(--tf-mono) !important; font-size: 12px !important; cursor: pointer; text-align: left; }
.tf-disclose::before { content: "▸"; display: inline-block; width: 14px; color: var(--tf-faint); }
.tf-disclose[aria-expanded="true"]::before { content: "▾"; }
.tf-disclose:hover { color: var(--tf-brand); }
.tf-ops { max-width: 300px; overflow: hidden; text-overflow: ellipsis; color: var(--tf-soft); font-family: var(--tf-mono); font-size: 11px; }
.tf-kernel-source td { padding: 0 0 8px !important; }
.tf-block { position: relative; background: var(--tf-sunken); border-radius: 6px; }
.tf-block pre { margin: 0; padding: 10px 12px; max-height: 340px; overflow: auto; white-space: pre; line-height: 1.5; }
.tf-copy { position: absolute; top: 6px; right: 8px; }
.tf-notes ul { margin: 0 0 10px; padding-left: 18px; }
.tf-notes dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 16px; margin: 8px 0 0; font-size: 12px; }
.tf-notes dt { color: var(--tf-soft); font-weight: 400; }
.tf-notes dd { margin: 0; overflow-wrap: anywhere; }

/* narrow */
@container (max-width: 920px) {
  .tf-columns { grid-template-columns: minmax(0, 1fr); }
  .tf-side { border-right: 0; border-bottom: 1px solid var(--tf-line); }
  .tf-passes { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 0 20px; }
  .tf-passes > h3, .tf-passes > .tf-call, .tf-passes > .tf-error { grid-column: 1 / -1; }
  .tf-code { height: 380px; }
}
@container (max-width: 760px) {
  .tf-panes { grid-template-columns: minmax(0, 1fr); }
  .tf-pane + .tf-pane { border-left: 0; border-top: 1px solid var(--tf-line); }
  .tf-code { height: 280px; }
  .tf-tile { flex: 1 0 40%; border-bottom: 1px solid var(--tf-line); }
  .tf-static { flex: 1 0 100%; padding: 6px 16px; }
  .tf-measure { flex: 1 0 100%; flex-direction: row; align-items: center; justify-content: flex-start; }
  .tf-ops { display: none; }
}
`;function H(e,t,a,n){let{ops:r,saved_bytes:o,kernels:i}=e.summary;return s("header",{class:"tf-verdict","data-testid":"tf-verdict"},ht(e.timing),v("saved","Saved for backward",K(d(o[0]),d(o[1])),P(o[0],o[1])),v("ops","Operators",K(r[0],r[1]),P(r[0],r[1])),v("kernels","Triton kernels",[s("b",null,i.unique)],D(`unique · ${c(i.launches,"launch","launches")}`)),gt(e.timing,t,a,n))}function v(e,t,a,n,r){return s("div",{class:`tf-tile${r?` tf-${r}`:""}`,"data-testid":`tf-tile-${e}`},s("span",{class:"tf-label"},t),s("span",{class:"tf-figure"},a),n)}function K(e,t){return e===t?[s("b",null,t)]:[s("span",{class:"tf-was"},e),s("span",{class:"tf-arrow","aria-label":"to"},"→"),s("b",null,t)]}function D(e){return s("span",{class:"tf-note"},e)}function P(e,t){let a=t<e?"better":t>e?"worse":"same";return s("span",{class:`tf-pill tf-${a}`},L(e,t)||"nothing to compare")}function ht(e){let t=e?.rows.find(o=>o.label==="step")??e?.rows.at(-1);if(!e||!t?.variant_ms)return v("time","Step time",[s("span",{class:"tf-was"},"not measured")],null);let n=[...t.baseline_ms?[s("span",{class:"tf-was"},p(t.baseline_ms.median)),s("span",{class:"tf-arrow"},"→")]:[],s("b",null,p(t.variant_ms.median)),s("span",{class:"tf-unit"},"ms")],r=s("span",{class:"tf-below"},_(t),D(e.stale?"of other passes: measure again":e.provenance));return v("time","Step time",n,r,e.stale?"stale":"")}function _(e){if(!e.ratio)return null;let{median:t,low:a,high:n}=e.ratio,r=a>1?"better":n<1?"worse":"same",o=`95 % interval ${a.toFixed(2)} to ${n.toFixed(2)}`;return s("span",{class:`tf-pill tf-${r}`,title:o},`${t.toFixed(2)}×`,s("small",null,` ${a.toFixed(2)}–${n.toFixed(2)}`))}function gt(e,t,a,n){if(!a)return s("span",{class:"tf-static","data-testid":"tf-static"},"saved page");let r=t.busy==="timing",o=r?"Measuring…":e?"Measure again":"Measure",i=!e||e.stale,f=r&&s("progress",{max:1,...t.progress===null?{}:{value:t.progress}});return s("div",{class:"tf-measure"},s("button",{class:`tf-button${i?" tf-primary":""}`,onclick:n,disabled:t.busy!=="","data-testid":"tf-measure"},o),f,r&&s("span",{class:"tf-note"},t.text))}function V(e,t){let{timing:a}=e,n=t.error?.panel==="timing"?t.error.message:null,r=n&&s("p",{class:"tf-error",role:"alert","data-testid":"tf-error-timing"},n);if(!a)return s("div",null,r,s("p",{class:"tf-note"},"Not measured yet. Measuring replays the recorded traces; your code is not run again."));let o=Math.max(...a.rows.flatMap(i=>[i.baseline_ms?.high??0,i.variant_ms?.high??0]))||1;return s("div",{class:a.stale?"tf-stale":""},r,a.stale&&s("p",{class:"tf-warn"},`These times are of ${a.config}. Measure again for the passes chosen now.`),s("table",{class:"tf-table","data-testid":"tf-timing"},R(["","as captured","optimised","","speed-up"],[1,2]),s("tbody",null,a.rows.map(i=>bt(i,o)))),s("p",{class:"tf-note"},`${a.provenance}. Median in ms, with its 95 % interval; bars share one scale.`),a.notes.map(i=>s("p",{class:"tf-note"},i)))}function bt(e,t){return s("tr",null,s("th",{scope:"row"},e.label),s("td",{class:"tf-right"},I(e.baseline_ms)),s("td",{class:"tf-right"},I(e.variant_ms)),s("td",{class:"tf-bars"},q(e.baseline_ms,t,"was"),q(e.variant_ms,t,"is")),s("td",null,_(e)))}function I(e){return e?s("span",null,p(e.median),s("small",{class:"tf-note"},` ${p(e.low)}–${p(e.high)}`)):s("span",{class:"tf-note"},"not measured")}function q(e,t,a){if(!e)return null;let n=s("i",null);n.style.left=`${100*e.low/t}%`,n.style.width=`${100*(e.high-e.low)/t}%`;let r=s("b",null);return r.style.width=`${100*e.median/t}%`,s("div",{class:`tf-bar tf-bar-${a}`,"aria-hidden":"true"},r,n)}function R(e,t){return s("thead",null,s("tr",null,e.map((a,n)=>s("th",{scope:"col",class:t.includes(n)?"tf-right":null},a))))}function W(e,t){if(e.kernels.length===0)return s("p",{class:"tf-note"},e.config.fuse?"No region of this trace became a Triton kernel; the decisions of `fuse` say why.":"Switch `fuse` on to turn regions into Triton kernels.");let a=e.kernels.find(n=>n.time_us!==null);return s("div",null,s("table",{class:"tf-table","data-testid":"tf-kernels"},R(["kernel","launches","reads","writes","time of one","operators"],[1,2,3,4]),s("tbody",null,e.kernels.flatMap(n=>mt(n,t)))),a&&s("p",{class:"tf-note"},`Times: ${a.provenance}, the mean over a kernel's launches. Bytes are of one launch.`))}function mt(e,t){let a=s("tr",{class:"tf-kernel-source",hidden:!t.has(e.name)},s("td",{colspan:6},xt(e))),n=s("button",{class:"tf-disclose","aria-expanded":String(t.has(e.name)),"data-testid":`tf-kernel-${e.name}`},e.name);n.onclick=()=>{a.hidden=!a.hidden,n.setAttribute("aria-expanded",String(!a.hidden)),a.hidden?t.delete(e.name):t.add(e.name)};let r=e.time_us===null?s("span",{class:"tf-note"},e.provenance):`${p(e.time_us)} µs`;return[s("tr",null,s("th",{scope:"row"},n),s("td",{class:"tf-right"},e.calls),s("td",{class:"tf-right"},d(e.nbytes_read)),s("td",{class:"tf-right"},d(e.nbytes_written)),s("td",{class:"tf-right"},r),s("td",{class:"tf-ops",title:e.ops.join(" ")},e.ops.join(" "))),a]}function xt(e){let t=s("button",{class:"tf-chip tf-copy"},"copy");return t.onclick=()=>M(e.source,t),s("div",{class:"tf-block"},t,s("pre",{tabindex:"0","data-testid":"tf-kernel-text"},e.source))}function U(e){let t=Object.entries(e.environment);return s("div",{class:"tf-notes","data-testid":"tf-notes"},e.notes.length===0&&s("p",{class:"tf-note"},"No guards: nothing that the cell read back to Python is baked into the trace."),e.notes.length>0&&s("ul",null,e.notes.map(a=>s("li",{class:`tf-${a.kind}`},a.text))),t.length>0&&s("dl",null,t.flatMap(([a,n])=>[s("dt",null,a),s("dd",null,n)])))}function G(e){return[["timing","Timing"],["kernels",`Kernels ${e.kernels.length}`],["notes",e.notes.length?c(e.notes.length,"note"):"Notes"]]}var J={busy:"",progress:null,text:"",error:null},C=class{constructor(t){this.payloads=t,this.state={payload:t[0],selected:"",status:J,live:!1},this.listeners=new Map}get(t){return this.state[t]}set(t,a){this.state[t]=a;for(let n of this.listeners.get(`change:${t}`)??[])n()}save_changes(){}on(t,a){this.listeners.set(t,(this.listeners.get(t)??new Set).add(a))}off(t,a){this.listeners.get(t)?.delete(a)}send(t){if(t.type!=="configure")return;let a={...this.state.payload.config,...t.changes},n=this.payloads.find(o=>vt(o.config,a));n&&this.set("payload",n);let r=n?null:{panel:"passes",message:wt(a)};this.set("status",{...J,error:r})}};function vt(e,t){return Object.keys(e).every(a=>JSON.stringify(e[a])===JSON.stringify(t[a]))}function wt(e){return`This saved page does not hold the combination “${["simplify","freeze","cat","remat","fuse"].filter(a=>e[a]!==null&&e[a]!==!1).join(" + ")||"no pass"}” with these options: run the cell in a notebook to see it.`}function yt(e,t,a){e({model:new C(t),el:a})}var j=class{constructor(t,a){this.model=t,this.diff=!0,this.tab="timing",this.shown=t.get("status"),this.open={passes:new Set,kernels:new Set},this.act={configure:o=>this.ask("passes",{type:"configure",changes:o}),select:o=>this.select(o),openKernel:o=>this.openKernel(o)},this.forward=new x("Forward",this.act),this.backward=new x("Backward",this.act),this.slots={verdict:s("div"),passes:s("div",{class:"tf-side"}),details:s("div"),tables:s("section",{class:"tf-tables"})},this.diffSwitch=s("input",{type:"checkbox",checked:!0,"data-testid":"tf-diff",onchange:()=>this.toggleDiff()});let n=s("div",{class:"tf-toolbar"},s("span",{class:"tf-note"},"Changes against the trace as captured"),s("label",null,this.diffSwitch,"show removed lines")),r=s("div",{class:"tf-main"},n,s("div",{class:"tf-panes"},this.forward.element,this.backward.element),this.slots.details);this.root=s("div",{class:"tf","data-testid":"tf-root"},s("style",null,F),s("div",{class:"tf-frame"},this.slots.verdict,s("div",{class:"tf-columns"},this.slots.passes,r),this.slots.tables)),this.root.addEventListener("keydown",o=>o.stopPropagation()),a.append(this.root)}get payload(){return this.model.get("payload")}get status(){return this.model.get("status")}ask(t,a){this.root.dataset.busy=t,this.model.send(a)}drawAll(){let{payload:t}=this,a=new Set(t.kernels.map(n=>n.name));this.forward.show(t.forward,t.values,a,this.diff),this.backward.show(t.backward,t.values,a,this.diff),this.drawVerdict(),this.drawPanels(),this.drawSelection(),this.root.dataset.ready="1"}drawStatus(){let{busy:t,error:a}=this.status,n=t===this.shown.busy&&a===this.shown.error;this.drawVerdict(),n||this.drawPanels()}drawVerdict(){this.root.dataset.busy=this.status.busy;let t=()=>this.ask("timing",{type:"measure"});this.swap(this.slots.verdict,H(this.payload,this.status,this.model.get("live"),t))}drawPanels(){this.shown=this.status,this.swap(this.slots.passes,N(this.payload,this.status,this.open.passes,this.act)),this.drawTables()}drawTables(){let{payload:t}=this;this.status.error?.panel==="timing"&&(this.tab="timing");let a={timing:()=>V(t,this.status),kernels:()=>W(t,this.open.kernels),notes:()=>U(t)},n=G(t).map(([o,i])=>s("button",{role:"tab","aria-selected":String(o===this.tab),onclick:()=>this.openTab(o),"data-testid":`tf-tab-${o}`},i)),r=s("div",{class:"tf-tab-body",role:"tabpanel"},a[this.tab]());this.swap(this.slots.tables,s("div",{class:"tf-tabs",role:"tablist"},n),r)}drawSelection(){let t=this.model.get("selected"),a=this.payload.values[t]?.twins??[];this.forward.highlight(t,a),this.backward.highlight(t,a),this.swap(this.slots.details,E(t,this.payload,this.act))}swap(t,...a){let n=t.contains(document.activeElement)?document.activeElement.dataset.testid:void 0;t.replaceChildren(...a),n&&t.querySelector(`[data-testid="${CSS.escape(n)}"]`)?.focus({preventScroll:!0})}openTab(t){this.tab=t,this.drawTables()}openKernel(t){this.open.kernels.add(t),this.openTab("kernels");let a=this.slots.tables.querySelector(`[data-testid="${CSS.escape(`tf-kernel-${t}`)}"]`);a?.scrollIntoView({block:"nearest"}),a?.focus({preventScroll:!0})}toggleDiff(){this.diff=this.diffSwitch.checked,this.drawAll()}select(t){this.model.set("selected",t),this.model.save_changes()}};function kt({model:e,el:t}){let a=new j(e,t),n=[["change:payload",()=>a.drawAll()],["change:status",()=>a.drawStatus()],["change:selected",()=>a.drawSelection()]];for(let[r,o]of n)e.on(r,o);return a.drawAll(),()=>{for(let[r,o]of n)e.off(r,o)}}var Wt={render:kt};export{Wt as default,yt as mountPage};
