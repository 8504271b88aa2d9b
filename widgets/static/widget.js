function s(t,e,...a){let n=document.createElement(t);for(let[r,o]of Object.entries(e??{}))o==null||o===!1||(typeof o=="function"||r==="value"||r==="checked"||r==="disabled"?n[r]=o:n.setAttribute(r,o===!0?"":String(o)));for(let r of a.flat())r==null||r===!1||n.append(r instanceof Node?r:String(r));return n}function p(t){let e=t<0?"−":"",a=Math.abs(t);for(let n of["B","KiB","MiB"]){if(a<1024)return`${e}${y(a)} ${n}`;a/=1024}return`${e}${y(a)} GiB`}function y(t){if(t===0)return"0";let e=Math.max(0,2-Math.floor(Math.log10(Math.abs(t))));return t.toFixed(Math.min(e,3)).replace(/(\.\d*?)0+$/,"$1").replace(/\.$/,"")}function m(t){return t===0?"0":t.toFixed(Math.min(4,Math.max(0,2-Math.floor(Math.log10(Math.abs(t))))))}function L(t){return t<1?`${y(t*1e3)} ms`:`${y(t)} s`}function E(t,e){if(!t)return"";let a=Math.round(100*(e-t)/t);return a===0?t===e?"unchanged":"±0 %":`${a<0?"−":"+"}${Math.abs(a)} %`}function k(t){return t===0?"±0":t<0?`−${-t}`:`+${t}`}function h(t,e,a){return`${t} ${t===1?e:a??e+"s"}`}var z=100,nt={" ":"","+":"+","-":"−","~":"~"},rt=/("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(torch\.ops\.\w+\.\w+(?:\.\w+)?)|([A-Za-z_]\w*)|(\d[\w.]*(?:e-?\d+)?)/g,ot=/^\s*\w+ = \w+\[\d+\]$/,it=new Set(["def","return","del","None","True","False","import","from","as"]),x=class{constructor(e,a){this.act=a,this.tokens=new Map,this.rows=new Map,this.kernels=new Set,this.count=s("span",{class:"tf-note"}),this.changes=s("span",{class:"tf-changes"}),this.body=s("div",{class:"tf-code",tabindex:"0",role:"group","aria-label":`${e} trace`,"data-testid":`tf-code-${e.toLowerCase()}`}),this.body.addEventListener("click",n=>this.onClick(n)),this.body.addEventListener("keydown",n=>this.onKey(n)),this.inputsOpen=!1,this.element=s("section",{class:"tf-pane"},s("div",{class:"tf-pane-head"},s("h3",null,e),this.count,this.changes),this.body)}show(e,a,n,r){this.kernels=n,this.tokens.clear(),this.rows.clear();let o=(r?e.lines:e.lines.filter(f=>f.diff!=="-")).map((f,u,at)=>ft(f,at[u+1],a)),i=f=>f.map(u=>this.row(u,a,r)),l=o.filter(f=>f.kind!=="input"&&f.kind!=="signature"),d=[];for(let f=0;f<l.length;f+=z){let u=s("div",{class:"tf-chunk"},i(l.slice(f,f+z)));u.style.containIntrinsicHeight=`auto ${18*z}px`,d.push(u)}let c=o.filter(f=>f.kind==="input");this.body.replaceChildren(...i(o.filter(f=>f.kind==="signature")),this.inputs(c,i(c),r),...d);let[g,b]=e.ops;this.count.textContent=g===b?`${b} ops`:`${g} → ${b} ops`,this.changes.replaceChildren(...e.added?[s("span",{class:"tf-plus"},`+${e.added}`)]:[],...e.removed?[s("span",{class:"tf-minus"},`−${e.removed}`)]:[]),this.changes.title=`lines against the unoptimised trace; ${k(b-g)} ops`}inputs(e,a,n){let r=l=>e.filter(d=>d.diff===l).length,[o,i]=[r("+"),r("-")];return s("details",{class:"tf-inputs",open:this.inputsOpen,ontoggle:l=>this.inputsOpen=l.target.open},s("summary",null,h(e.length-i,"input"),n&&o>0&&s("span",{class:"tf-plus"},` +${o}`),n&&i>0&&s("span",{class:"tf-minus"},` −${i}`)),s("div",{class:"tf-chunk"},a))}row(e,a,n){let r=n?e.diff:" ",o=`tf-line tf-is-${e.kind}${r==="-"?" tf-del":r==="+"?" tf-add":r==="~"?" tf-mod":""}`,i=e.kind==="op",l=s("div",{class:`${o}${i&&ot.test(e.code)?" tf-is-item":""}`,"data-defines":e.value||null},s("span",{class:"tf-glyph","aria-label":{"+":"added","-":"removed","~":"changed"}[r.trim()]},nt[r]),s("code",null,...this.paint(e.code,a),!i&&e.comment&&s("span",{class:"tf-type"},e.comment)),i&&e.comment&&lt(e.comment));return e.value&&(e.diff!=="-"||!this.rows.has(e.value))&&this.rows.set(e.value,l),l}paint(e,a){let n=[],r=0;for(let o of e.matchAll(rt)){let[i,l,d,c,g]=o,b=l?"string":d?"op":g?"number":it.has(i)?"keyword":"",f=!!c&&this.kernels.has(i),u=!!c&&!f&&Object.hasOwn(a,i);!b&&!u&&!f||(n.push(e.slice(r,o.index)),n.push(u?this.token(i):f?ct(i):d?dt(i):s("span",{class:`tf-${b}`},i)),r=o.index+i.length)}return n.push(e.slice(r)),n}token(e){let a=s("span",{class:"tf-value","data-value":e},e),n=this.tokens.get(e);return n?n.push(a):this.tokens.set(e,[a]),a}highlight(e,a){for(let i of this.body.querySelectorAll(".tf-selected, .tf-current, .tf-twin"))i.classList.remove("tf-selected","tf-current","tf-twin");if(!e)return;for(let i of this.tokens.get(e)??[])i.classList.add("tf-selected");this.rows.get(e)?.classList.add("tf-current");for(let i of a)this.rows.get(i)?.classList.add("tf-twin");let n=this.rows.get(e),r=a.map(i=>this.rows.get(i)).find(Boolean),o=n?.classList.contains("tf-is-op")?n:r??n??this.tokens.get(e)?.[0];o&&(o.closest("details")?.setAttribute("open",""),this.reveal(o),requestAnimationFrame(()=>this.reveal(o)))}reveal(e){let a=this.body.getBoundingClientRect(),n=e.getBoundingClientRect();n.top>=a.top&&n.bottom<=a.bottom||(this.body.scrollTop+=n.top-a.top-a.height/3)}onClick(e){let a=e.target,n=a.closest("[data-kernel]");if(n)return this.act.openKernel(n.dataset.kernel);let r=a.closest("[data-value]"),o=a.closest("[data-defines]"),i=r?.dataset.value??o?.dataset.defines;i?this.act.select(i):a.closest(".tf-is-signature, .tf-is-return, .tf-is-free")?.classList.toggle("tf-unfolded")}onKey(e){if(e.key==="Escape")return this.act.select("");let a=e.key==="ArrowDown"?1:e.key==="ArrowUp"?-1:0;if(!a||this.rows.size===0)return;e.preventDefault(),e.stopPropagation();let n=[...this.rows].filter(([,i])=>!i.closest("details:not([open])")).map(([i])=>i),r=n.findIndex(i=>this.rows.get(i)?.classList.contains("tf-current")),o=r<0?a>0?0:n.length-1:Math.min(n.length-1,Math.max(0,r+a));this.act.select(n[o])}};function lt(t){let[e,...a]=t.replace(/^# /,"").split("  ");return s("code",{class:"tf-types",title:t.slice(2)},s("span",{class:"tf-type"},e),s("span",{class:"tf-note"},`  ${a.join("  ")}`))}function ft(t,e,a){if(t.kind!=="group"||!e)return t;let[n,r]=(a[e.value]?.module??"").split(": ");return/(^|\.)\d+$/.test(n)&&t.comment.startsWith(`# ${n}  `)?{...t,comment:t.comment.replace(n,`${n} (${r})`)}:t}function dt(t){let e="torch.ops.";return s("span",{class:"tf-op",title:t},s("span",{class:"tf-prefix"},e),t.slice(e.length))}function ct(t){return s("span",{class:"tf-kernel","data-kernel":t,title:"show the Triton source"},t)}var M=[[1,"1: full size"],[.5,"½: half"],[0,"0: free"]],v=[null,...Array.from({length:10},(t,e)=>(10-e)/10)],$="this saved page holds no other choice: run the cell in a notebook to change it";function F(t,e,a,n){let{config:r}=e;return[t.name==="remat"&&pt(r,n),t.name==="remat"&&ut(t,r,n),t.name==="freeze"&&mt(r,a,n),t.options.length>0&&gt(t,r,a,n)]}function pt(t,e){let n=M.some(([i])=>i===t.remat)?M:[...M,[t.remat,String(t.remat)]],r=i=>i===t.remat||e.holds({remat:i}),o=n.filter(([i])=>r(i)).length<2;return s("label",{class:"tf-option",title:o?$:"how much a saved value counts that its producer's region reads anyway"},"input weight",s("select",{onchange:i=>e.configure({remat:Number(i.target.value)}),disabled:o,"data-testid":"tf-remat-weight"},n.map(([i,l])=>s("option",{value:String(i),selected:i===t.remat,disabled:!r(i)},l))))}function ut(t,e,a){let n=s("span",{class:"tf-budget"},T(e.memory_budget)),r=s("input",{type:"range",min:"0",max:String(v.length-1),disabled:!a.live,"aria-valuetext":T(e.memory_budget),"data-testid":"tf-memory-budget"});r.value=String(ht(e.memory_budget,t.saved_bytes?.[0]??0)),r.oninput=()=>{n.textContent=T(v[Number(r.value)]),r.setAttribute("aria-valuetext",n.textContent)},r.onchange=()=>a.configure({memory_budget:v[Number(r.value)]});let o=a.live?"how much of what the forward would keep for the backward it may keep; bytes by memory_budget in Python":$;return s("label",{class:"tf-option",title:o},"budget",r,n)}function T(t){return t===null?"off":t<=1?`${Math.round(100*t)} %`:p(t)}function ht(t,e){if(t===null)return 0;let a=t<=1?t:e>0?t/e:1;return Math.min(v.length-1,Math.max(1,v.length-Math.round(10*a)))}function mt(t,e,a){let n=(t.freeze??[]).join(", ");P(e.typed.freeze??"").join()===(t.freeze??[]).join()&&delete e.typed.freeze;let r=i=>e.typed.freeze=i.target.value,o=i=>a.configure({freeze:P(i.target.value)});return s("label",{class:"tf-option",title:a.live?"names or globs of parameters whose gradients nobody wants, separated by commas":$},"names",s("input",{type:"text",value:e.typed.freeze??n,placeholder:"h.*.mlp.*",spellcheck:"false",disabled:!a.live,oninput:r,onchange:o,"data-testid":"tf-freeze"}))}function P(t){return t.split(",").map(e=>e.trim()).filter(Boolean)}function gt(t,e,a,n){let r=`${t.name} options`,o=t.options.filter(i=>i.value!==i.default).length;return s("details",{class:"tf-more",open:a.passes.has(r),ontoggle:i=>i.target.open?a.passes.add(r):a.passes.delete(r)},s("summary",{"data-testid":`tf-options-${t.name}`},"options",o>0&&s("span",{class:"tf-note"},` ${o} set`)),t.options.map(i=>s("div",{class:"tf-more-option"},bt(t,i,e,a,n),xt(i))))}function bt(t,e,a,n,r){let o=`${t.name}.${e.name}`;n.typed[o]===e.value&&delete n.typed[o];let i=c=>r.configure(vt(t.name,e.name,c,a)),l={disabled:!r.live,"data-testid":`tf-option-${t.name}-${e.name}`},d=e.kind==="switch"?s("input",{...l,type:"checkbox",checked:e.value,onchange:c=>i(c.target.checked)}):s("input",{...l,type:"text",inputmode:e.kind==="number"?"decimal":"text",spellcheck:"false",value:n.typed[o]??e.value,placeholder:String(e.default||"none"),oninput:c=>n.typed[o]=c.target.value,onchange:c=>i(c.target.value.trim()||e.default)});return s("label",{class:"tf-option",title:r.live?null:$},s("span",{class:"tf-option-name"},e.name),d)}function xt(t){let e=t.kind==="switch"?t.default?"on":"off":t.default||"none";return s("p",{class:"tf-note"},t.help,t.help&&" ",`(default: ${e})`)}function vt(t,e,a,n){let r=t==="remat"?"remat_options":t,o=n[r];return{[r]:{...typeof o=="object"?o:{},[e]:a}}}var wt=.5,K=8,yt=40;function H(t,e,a,n){let r=e.error?.panel==="passes"?e.error:null,o=t.passes.some(i=>i.name===r?.at);return s("section",{class:"tf-passes","aria-label":"Passes","aria-busy":String(e.busy==="passes")},s("h3",null,"Passes"),t.passes.map(i=>kt(i,t,a,n,r?.at===i.name?r.message:null)),r&&!o&&I(r.message),_t(t.call))}function I(t){return s("p",{class:"tf-error",role:"alert","data-testid":"tf-error-passes"},t)}function kt(t,e,a,n,r){let o=`tf-${t.name}-${Math.random().toString(36).slice(2,8)}`;return s("div",{class:`tf-pass${t.enabled?"":" tf-off"}`,"data-testid":`tf-pass-${t.name}`},s("div",{class:"tf-pass-head"},s("input",{type:"checkbox",role:"switch",id:o,class:"tf-switch",checked:t.enabled,disabled:!t.enabled&&t.state!=="off",onchange:()=>n.configure({[t.name]:$t(t)}),"data-testid":`tf-toggle-${t.name}`}),s("label",{for:o,title:t.help},t.name),t.seconds!==null&&s("span",{class:"tf-note tf-seconds",title:"how long the pass itself took, not the program"},`took ${L(t.seconds)}`)),...t.enabled?F(t,e,a,n):[],r&&I(r),s("div",{class:"tf-effect"},St(t)),t.error&&s("p",{class:"tf-error",role:"alert"},t.error),t.enabled&&t.decisions.length>0&&zt(t,e,a.passes,n))}function $t(t){return t.name==="freeze"?t.enabled?null:[]:t.name==="remat"?t.enabled?null:wt:!t.enabled}function St(t){if(!t.enabled)return[s("span",{class:"tf-note"},t.state)];if(!t.ops||!t.saved_bytes)return[];let e=t.ops[1]-t.ops[0],a=t.saved_bytes[1]-t.saved_bytes[0];return e===0&&a===0?[s("span",{class:"tf-note"},"same size")]:[e!==0&&s("span",{class:e<0?"tf-gain":"tf-cost"},`${k(e)} ops`),a!==0&&s("span",{class:a<0?"tf-gain":"tf-cost"},`keeps ${p(Math.abs(a))} ${a<0?"less":"more"} for backward`)].filter(n=>n!==!1)}function zt(t,e,a,n){let r=t.decisions.slice(0,yt),o=t.decisions.length-r.length,i=t.decisions.reduce((l,d)=>l+d.values.length,0);return s("details",{class:"tf-reasons",open:a.has(t.name),ontoggle:l=>l.target.open?a.add(t.name):a.delete(t.name)},s("summary",{"data-testid":`tf-reasons-${t.name}`},h(i,"decision")),s("ul",null,r.map(l=>Tt(l,n))),o>0&&s("p",{class:"tf-note"},`and ${h(o,"more reason")}: ${Mt(t,e)}`))}function Mt({name:t},{call:e,passes:a}){if(!e)return"re-run with `-o c` to print them";let n=a.filter(r=>r.enabled).findIndex(r=>r.name===t);return`\`print(${e}.steps[${n}])\` has all`}function Tt(t,e){let a=t.values.length-K;return s("li",null,s("span",{class:"tf-action"},t.action,t.values.length>1&&` × ${t.values.length}`),t.nbytes>0&&s("span",{class:"tf-note"},` ${p(t.nbytes)}`),s("span",{class:"tf-why"},t.reason),s("span",{class:"tf-chips"},t.values.slice(0,K).map(n=>_(n,e)),a>0&&s("span",{class:"tf-note"},`+${a}`)))}function _(t,e){return s("button",{class:"tf-chip",onclick:()=>e.select(t)},t)}function _t(t){if(!t)return s("p",{class:"tf-note","data-testid":"tf-call"},"re-run with ",s("code",null,"-o c")," to use it in Python");let e=s("button",{class:"tf-chip",title:"copy"},"copy");return e.onclick=()=>C(t,e),s("div",{class:"tf-call"},s("span",{class:"tf-label"},"In Python"),s("code",{"data-testid":"tf-call"},t),e)}async function C(t,e){try{await navigator.clipboard.writeText(t),e.textContent="copied"}catch{e.textContent="select the text and press Ctrl+C"}setTimeout(()=>e.textContent="copy",1500)}var D=12;function q(t,e,a){let n=e.values[t],r={class:"tf-details","data-testid":"tf-details","aria-live":"polite"};return n?s("div",r,s("div",{class:"tf-facts"},s("b",{class:"tf-name"},t),s("code",null,n.type),s("span",null,p(n.nbytes)),s("span",null,n.op),s("span",{class:"tf-note"},n.phase),n.saved&&s("span",{class:"tf-badge"},"saved for backward"),n.removed&&s("span",{class:"tf-badge"},"removed by a pass"),s("button",{class:"tf-chip tf-close","aria-label":"clear the selection",onclick:()=>a.select("")},"×")),n.source&&S("line",s("code",{class:"tf-source"},n.source)),n.module&&S("module",s("code",null,n.module)),O("reads",n.reads,a),O("read by",n.uses,a),O(n.phase==="forward"?"backward twin":"forward twin",n.twins,a),...Ct(t,e)):s("div",r,s("span",{class:"tf-note"},"Click a value, or walk with ↑ ↓, to see who reads it and what was decided about it."))}function S(t,...e){return s("div",{class:"tf-fact"},s("span",{class:"tf-label"},t),s("span",{class:"tf-chips"},...e))}function O(t,e,a){if(e.length===0)return null;let n=e.length-D;return S(t,...e.slice(0,D).map(r=>_(r,a)),n>0?s("span",{class:"tf-note"},`+${n}`):"")}function Ct(t,e){return e.passes.flatMap(a=>a.decisions.filter(n=>n.values.includes(t)).map(n=>S(a.name,s("span",null,s("span",{class:"tf-action"},n.action),` ${n.reason}`))))}var U=`/* Colours come from JupyterLab's theme where there is one; light-dark() has the page's own for the rest. */
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
.tf-blocked { flex: 1 0 100%; margin: 0 !important; padding: 7px 16px; border-top: 1px solid var(--tf-line); color: var(--tf-warn); background: var(--tf-warn-wash); font-size: 12px; overflow-wrap: anywhere; }
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
.tf-option :disabled, .tf-switch:disabled { opacity: .6; cursor: not-allowed; }
.tf-option input { font-family: var(--tf-mono); font-size: 11px; }
.tf-option input::placeholder { color: var(--tf-faint); opacity: 1; }
.tf-option input[type="range"] { height: 16px; padding: 0; border: 0; background: none; accent-color: var(--tf-brand); cursor: pointer; }
.tf-option input[type="checkbox"] { flex: none; height: auto; margin-left: auto; accent-color: var(--tf-brand); }
.tf-budget { flex: none; min-width: 40px; text-align: right; color: var(--tf-text); font-variant-numeric: tabular-nums; }
.tf-more { padding: 2px 0 4px 36px; font-size: 12px; }
.tf-more summary { cursor: pointer; color: var(--tf-soft); margin-left: -1px; }
.tf-more summary:hover { color: var(--tf-brand); }
.tf-more-option { margin-left: -36px; padding: 6px 0; border-top: 1px dashed var(--tf-line); }
.tf-more summary + .tf-more-option { margin-top: 4px; }
.tf-more-option .tf-option { flex-wrap: wrap; gap: 2px 8px; padding: 0; }
.tf-more-option .tf-option input[type="text"] { flex: 1 0 72px; }
.tf-more-option p { margin-top: 2px; overflow-wrap: anywhere; }
.tf-option-name { flex: 1 1 auto; font-family: var(--tf-mono); font-size: 11px; color: var(--tf-text); overflow-wrap: anywhere; }
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
.tf-line { display: flex; height: 18px; line-height: 18px; background: var(--tf-bg); border-left: 2px solid transparent; }
.tf-line[data-defines] { cursor: pointer; }
.tf-line[data-defines]:hover { background: var(--tf-sunken); }
.tf-line code { white-space: pre; line-height: 18px; display: block; }
.tf-glyph { flex: none; width: 20px; text-align: center; font: 600 12px/18px var(--tf-mono); user-select: none; }
.tf-add { background: var(--tf-good-wash); }
.tf-add .tf-glyph { color: var(--tf-good); }
.tf-del { background: var(--tf-bad-wash); }
.tf-del .tf-glyph { color: var(--tf-bad); }
.tf-del code:not(.tf-types) { opacity: .8; }
.tf-mod { background: var(--tf-warn-wash); }
.tf-mod .tf-glyph { color: var(--tf-warn); }
.tf-line > code:last-child { padding-right: 16px; }
.tf .tf-types { display: flex; position: sticky; right: 0; margin-left: auto; padding-left: 14px; background: inherit; font-variant-numeric: tabular-nums; }
.tf-types::before { content: ""; position: absolute; top: 0; bottom: 0; left: -14px; width: 14px; background: inherit; mask: linear-gradient(to left, #000, transparent); pointer-events: none; }
.tf-types .tf-note { text-align: right; min-width: 9ch; }
.tf-types .tf-type { max-width: 30cqi; overflow: hidden; text-overflow: ellipsis; }
.tf-is-item code:not(.tf-types) { opacity: .55; }
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
  .tf-ops, .tf-timing :is(th, td):nth-child(4) { display: none; }
}
`;function W(t,e,a,n){let{ops:r,saved_bytes:o,kernels:i}=t.summary,l=`unique · ${h(i.launches,"launch","launches")}`;return s("header",{class:"tf-verdict","data-testid":"tf-verdict"},Nt(t,a),w("saved","Saved for backward",R(p(o[0]),p(o[1])),V(o[0],o[1],t.blocked)),w("ops","Operators",R(r[0],r[1]),V(r[0],r[1],t.blocked)),w("kernels","Triton kernels",[s("b",null,i.unique)],i.unique>0?N(l):null),jt(t,e,a,n),t.blocked&&s("p",{class:"tf-blocked",role:"status","data-testid":"tf-blocked"},t.blocked))}function w(t,e,a,n,r){return s("div",{class:`tf-tile${r?` tf-${r}`:""}`,"data-testid":`tf-tile-${t}`},s("span",{class:"tf-label"},e),s("span",{class:"tf-figure"},a),n)}function R(t,e){return t===e?[s("b",null,e)]:[s("span",{class:"tf-was"},t),s("span",{class:"tf-arrow","aria-label":"to"},"→"),s("b",null,e)]}function N(t){return s("span",{class:"tf-note"},t)}function V(t,e,a){let n=a?"same":e<t?"better":e>t?"worse":"same";return s("span",{class:`tf-pill tf-${n}`},E(t,e)||"nothing to compare")}function Nt({timing:t,kernels:e,runs_triton:a},n){let r=t?.rows.find(g=>g.label==="step")??t?.rows.at(-1);if(!t||!r?.variant_ms)return w("time","Step time",[s("span",{class:"tf-was"},"not measured")],null);let i=[...r.baseline_ms?[s("span",{class:"tf-was"},m(r.baseline_ms.median)),s("span",{class:"tf-arrow"},"→")]:[],s("b",null,m(r.variant_ms.median)),s("span",{class:"tf-unit"},"ms")],l=n?"of other passes: measure again":"of other passes: run the cell in a notebook to measure these passes",d=!a&&e.length>0&&N("Triton kernels did not run: CPU"),c=s("span",{class:"tf-below"},j(r),N(t.stale?l:t.provenance),d);return w("time","Step time",i,c,t.stale?"stale":"")}function j(t){let{median:e,low:a,high:n}=t.ratio,r=t.verdict==="faster"?"better":t.verdict==="slower"?"worse":null,o=`optimised / captured: ${e.toFixed(2)}; 95 % interval ${a.toFixed(2)} to ${n.toFixed(2)}`,i=r?`${e.toFixed(2)}× the time`:t.verdict;return s("span",{class:`tf-pill tf-${r??"same"}`,title:o},i,s("small",null,` ${a.toFixed(2)}–${n.toFixed(2)}`))}function jt({timing:t,blocked:e},a,n,r){if(!n)return s("span",{class:"tf-static","data-testid":"tf-static"},"saved page");let o=a.busy==="timing",i=o?"Measuring…":t?"Measure again":"Measure",l=!t||t.stale,d=o&&s("progress",{max:1,...a.progress===null?{}:{value:a.progress}});return s("div",{class:"tf-measure"},s("button",{class:`tf-button${l?" tf-primary":""}`,onclick:r,disabled:a.busy!==""||e!==null,title:e,"data-testid":"tf-measure"},i),d,o&&s("span",{class:"tf-note"},a.text))}var Bt="Not measured yet. Measuring replays the recorded traces; your code is not run again.",G="Run the cell in a notebook to measure these passes.";function X(t,e,a){let{timing:n}=t,r=e.error?.panel==="timing"?e.error.message:null,o=r&&s("p",{class:"tf-error",role:"alert","data-testid":"tf-error-timing"},r);if(!n)return s("div",null,o,s("p",{class:"tf-note"},t.blocked??(a?Bt:`Not measured. ${G}`)));let i=Math.max(...n.rows.flatMap(l=>[l.baseline_ms?.high??0,l.variant_ms?.high??0]))||1;return s("div",{class:n.stale?"tf-stale":""},o,n.stale&&s("p",{class:"tf-warn"},`These times are of ${n.config}. ${a?"Measure again for the passes chosen now.":G}`),s("table",{class:"tf-table tf-timing","data-testid":"tf-timing"},Z(["","as captured","optimised","","optimised / captured"],[1,2]),s("tbody",null,n.rows.map(l=>At(l,i)))),s("p",{class:"tf-note"},`${n.provenance}. Median in ms, with its 95 % interval; bars share one scale.`),!t.runs_triton&&t.kernels.length>0&&s("p",{class:"tf-note"},"Triton kernels did not run: CPU. Both programs ran ATen operators."),n.notes.map(l=>s("p",{class:"tf-note"},l)))}function At(t,e){return s("tr",null,s("th",{scope:"row"},t.label),s("td",{class:"tf-right"},J(t.baseline_ms)),s("td",{class:"tf-right"},J(t.variant_ms)),s("td",{class:"tf-bars"},Y(t.baseline_ms,e,"was"),Y(t.variant_ms,e,"is")),s("td",null,j(t)))}function J(t){return t?s("span",null,m(t.median),s("small",{class:"tf-note"},` ${m(t.low)}–${m(t.high)}`)):s("span",{class:"tf-note"},"not measured")}function Y(t,e,a){if(!t)return null;let n=s("i",null);n.style.left=`${100*t.low/e}%`,n.style.width=`${100*(t.high-t.low)/e}%`;let r=s("b",null);return r.style.width=`${100*t.median/e}%`,s("div",{class:`tf-bar tf-bar-${a}`,"aria-hidden":"true"},r,n)}function Z(t,e){return s("thead",null,s("tr",null,t.map((a,n)=>s("th",{scope:"col",class:e.includes(n)?"tf-right":null},a))))}function Q(t,e){if(t.kernels.length===0)return s("p",{class:"tf-note"},t.config.fuse?"No region of this trace became a Triton kernel; the decisions of `fuse` say why.":"Switch `fuse` on to turn regions into Triton kernels.");let a=t.kernels.find(r=>r.time_us!==null),n=t.runs_triton?"No times of single kernels: press Measure.":"No times: a CPU never runs Triton kernels, it runs their ATen operators. Bytes are of one launch.";return s("div",null,s("table",{class:"tf-table","data-testid":"tf-kernels"},Z(["kernel","launches","reads","writes","time of one","operators"],[1,2,3,4]),s("tbody",null,t.kernels.flatMap(r=>Lt(r,e)))),s("p",{class:"tf-note"},a?`Times: ${a.provenance}, the mean over a kernel's launches. Bytes are of one launch.`:n))}function Lt(t,e){let a=s("tr",{class:"tf-kernel-source",hidden:!e.has(t.name)},s("td",{colspan:6},Et(t))),n=s("button",{class:"tf-disclose","aria-expanded":String(e.has(t.name)),"data-testid":`tf-kernel-${t.name}`},t.name);n.onclick=()=>{a.hidden=!a.hidden,n.setAttribute("aria-expanded",String(!a.hidden)),a.hidden?e.delete(t.name):e.add(t.name)};let r=t.time_us===null?"":`${m(t.time_us)} µs`;return[s("tr",null,s("th",{scope:"row"},n),s("td",{class:"tf-right"},t.calls),s("td",{class:"tf-right"},p(t.nbytes_read)),s("td",{class:"tf-right"},p(t.nbytes_written)),s("td",{class:"tf-right"},r),s("td",{class:"tf-ops",title:t.ops.join(" ")},t.ops.join(" "))),a]}function Et(t){let e=s("button",{class:"tf-chip tf-copy"},"copy");return e.onclick=()=>C(t.source,e),s("div",{class:"tf-block"},e,s("pre",{tabindex:"0","data-testid":"tf-kernel-text"},t.source))}function tt(t){let e=Object.entries(t.environment);return s("div",{class:"tf-notes","data-testid":"tf-notes"},t.notes.length===0&&s("p",{class:"tf-note"},"No guards: nothing that the cell read back to Python is baked into the trace."),t.notes.length>0&&s("ul",null,t.notes.map(a=>s("li",{class:`tf-${a.kind}`},a.text))),e.length>0&&s("dl",null,e.flatMap(([a,n])=>[s("dt",null,a),s("dd",null,n)])))}function et(t){return[["timing","Timing"],["kernels",`Kernels ${t.kernels.length}`],["notes",t.notes.length?h(t.notes.length,"note"):"Notes"]]}var st={busy:"",progress:null,text:"",error:null},B=class{constructor(e){this.payloads=e,this.state={payload:e[0],selected:"",status:st,live:!1},this.listeners=new Map}get(e){return this.state[e]}set(e,a){this.state[e]=a;for(let n of this.listeners.get(`change:${e}`)??[])n()}save_changes(){}on(e,a){this.listeners.set(e,(this.listeners.get(e)??new Set).add(a))}off(e,a){this.listeners.get(e)?.delete(a)}send(e){if(e.type!=="configure")return;let a=this.find(e.changes);a&&this.set("payload",a);let[n]=Object.keys(e.changes),r=a?null:{panel:"passes",at:n,message:Ft(this.state.payload,e.changes)};this.set("status",{...st,error:r})}holds(e){return this.find(e)!==void 0}find(e){let a={...this.state.payload.config,...e};return this.payloads.find(n=>Pt(n.config,a))}};function Pt(t,e){return Object.keys(t).every(a=>JSON.stringify(t[a])===JSON.stringify(e[a]))}function Ft({config:t,passes:e},a){let n={...t,...a};return`This saved page does not hold the combination “${e.map(o=>o.name).filter(o=>n[o]!==null&&n[o]!==!1).join(" + ")||"no pass"}” with these options: run the cell in a notebook to see it.`}function Kt(t,e,a){t({model:new B(e),el:a})}var A=class{constructor(e,a){this.model=e,this.diff=!0,this.tab="timing",this.shown=e.get("status"),this.open={passes:new Set,kernels:new Set,typed:{}},this.act={configure:o=>this.ask("passes",{type:"configure",changes:o}),select:o=>this.select(o),openKernel:o=>this.openKernel(o),live:e.get("live"),holds:o=>e.holds?.(o)??!0},this.forward=new x("Forward",this.act),this.backward=new x("Backward",this.act),this.slots={verdict:s("div"),passes:s("div",{class:"tf-side"}),details:s("div"),tables:s("section",{class:"tf-tables"})},this.diffSwitch=s("input",{type:"checkbox",checked:!0,"data-testid":"tf-diff",onchange:()=>this.toggleDiff()});let n=s("div",{class:"tf-toolbar"},s("span",{class:"tf-note"},"Changes against the trace as captured"),s("label",null,this.diffSwitch,"show removed lines")),r=s("div",{class:"tf-main"},n,s("div",{class:"tf-panes"},this.forward.element,this.backward.element),this.slots.details);this.root=s("div",{class:"tf","data-testid":"tf-root"},s("style",null,U),s("div",{class:"tf-frame"},this.slots.verdict,s("div",{class:"tf-columns"},this.slots.passes,r),this.slots.tables)),this.root.addEventListener("keydown",o=>o.stopPropagation()),a.append(this.root)}get payload(){return this.model.get("payload")}get status(){return this.model.get("status")}ask(e,a){this.root.dataset.busy=e,this.model.send(a)}drawAll(){let{payload:e}=this,a=new Set(e.kernels.map(n=>n.name));this.forward.show(e.forward,e.values,a,this.diff),this.backward.show(e.backward,e.values,a,this.diff),this.drawVerdict(),this.drawPanels(),this.drawSelection(),this.root.dataset.ready="1"}drawStatus(){let{busy:e,error:a}=this.status,n=e===this.shown.busy&&a===this.shown.error;this.drawVerdict(),n||this.drawPanels()}drawVerdict(){this.root.dataset.busy=this.status.busy;let e=()=>this.ask("timing",{type:"measure"});this.swap(this.slots.verdict,W(this.payload,this.status,this.model.get("live"),e))}drawPanels(){this.shown=this.status,this.swap(this.slots.passes,H(this.payload,this.status,this.open,this.act)),this.drawTables()}drawTables(){let{payload:e}=this;this.status.error?.panel==="timing"&&(this.tab="timing");let a={timing:()=>X(e,this.status,this.act.live),kernels:()=>Q(e,this.open.kernels),notes:()=>tt(e)},n=et(e).map(([o,i])=>s("button",{role:"tab","aria-selected":String(o===this.tab),onclick:()=>this.openTab(o),"data-testid":`tf-tab-${o}`},i)),r=s("div",{class:"tf-tab-body",role:"tabpanel"},a[this.tab]());this.swap(this.slots.tables,s("div",{class:"tf-tabs",role:"tablist"},n),r)}drawSelection(){let e=this.model.get("selected"),a=this.payload.values[e]?.twins??[];this.forward.highlight(e,a),this.backward.highlight(e,a),this.swap(this.slots.details,q(e,this.payload,this.act))}swap(e,...a){let n=e.contains(document.activeElement)?document.activeElement.dataset.testid:void 0;e.replaceChildren(...a),n&&e.querySelector(`[data-testid="${CSS.escape(n)}"]`)?.focus({preventScroll:!0})}openTab(e){this.tab=e,this.drawTables()}openKernel(e){this.open.kernels.add(e),this.openTab("kernels");let a=this.slots.tables.querySelector(`[data-testid="${CSS.escape(`tf-kernel-${e}`)}"]`);a?.scrollIntoView({block:"nearest"}),a?.focus({preventScroll:!0})}toggleDiff(){this.diff=this.diffSwitch.checked,this.drawAll()}select(e){this.model.set("selected",e),this.model.save_changes()}};function Ht({model:t,el:e}){let a=new A(t,e),n=[["change:payload",()=>a.drawAll()],["change:status",()=>a.drawStatus()],["change:selected",()=>a.drawSelection()]];for(let[r,o]of n)t.on(r,o);return a.drawAll(),()=>{for(let[r,o]of n)t.off(r,o)}}var ue={render:Ht};export{ue as default,Kt as mountPage};
