function a(e,t,...s){let n=document.createElement(e);for(let[r,o]of Object.entries(t??{}))o==null||o===!1||(typeof o=="function"||r==="value"||r==="checked"||r==="disabled"?n[r]=o:n.setAttribute(r,o===!0?"":String(o)));for(let r of s.flat())r==null||r===!1||n.append(r instanceof Node?r:String(r));return n}function p(e){let t=e<0?"−":"",s=Math.abs(e);for(let n of["B","KiB","MiB"]){if(s<1024)return`${t}${k(s)} ${n}`;s/=1024}return`${t}${k(s)} GiB`}function k(e){if(e===0)return"0";let t=Math.max(0,2-Math.floor(Math.log10(Math.abs(e))));return e.toFixed(Math.min(t,3)).replace(/(\.\d*?)0+$/,"$1").replace(/\.$/,"")}function h(e){return e===0?"0":e.toFixed(Math.min(4,Math.max(0,2-Math.floor(Math.log10(Math.abs(e))))))}function F(e){return e<1?`${k(e*1e3)} ms`:`${k(e)} s`}function D(e,t){if(!e)return"";let s=Math.round(100*(t-e)/e);return s===0?e===t?"unchanged":"±0 %":`${s<0?"−":"+"}${Math.abs(s)} %`}function $(e){return e===0?"±0":e<0?`−${-e}`:`+${e}`}function x(e,t,s){return`${e} ${e===1?t:s??t+"s"}`}var M=[[1,"1: full size"],[.5,"½: half"],[0,"0: free"]],w=[null,...Array.from({length:10},(e,t)=>(10-t)/10)],S="this saved page holds no other choice: run the cell in a notebook to change it";function I(e,t,s,n){let{config:r}=t;return[e.name==="remat"&&ft(r,n),e.name==="remat"&&dt(e,r,n),e.name==="freeze"&&pt(r,s,n),e.options.length>0&&ut(e,r,s,n)]}function ft(e,t){let n=M.some(([i])=>i===e.remat)?M:[...M,[e.remat,String(e.remat)]],r=i=>i===e.remat||t.holds({remat:i}),o=n.filter(([i])=>r(i)).length<2;return a("label",{class:"tf-option",title:o?S:"how much a saved value counts that its producer's region reads anyway"},"input weight",a("select",{onchange:i=>t.configure({remat:Number(i.target.value)}),disabled:o,"data-testid":"tf-remat-weight"},n.map(([i,l])=>a("option",{value:String(i),selected:i===e.remat,disabled:!r(i)},l))))}function dt(e,t,s){let n=a("span",{class:"tf-budget"},C(t.memory_budget)),r=a("input",{type:"range",min:"0",max:String(w.length-1),disabled:!s.live,"aria-valuetext":C(t.memory_budget),"data-testid":"tf-memory-budget"});r.value=String(ct(t.memory_budget,e.saved_bytes?.[0]??0)),r.oninput=()=>{n.textContent=C(w[Number(r.value)]),r.setAttribute("aria-valuetext",n.textContent)},r.onchange=()=>s.configure({memory_budget:w[Number(r.value)]});let o=s.live?"how much of what the forward would keep for the backward it may keep; bytes by memory_budget in Python":S;return a("label",{class:"tf-option",title:o},"budget",r,n)}function C(e){return e===null?"off":e<=1?`${Math.round(100*e)} %`:p(e)}function ct(e,t){if(e===null)return 0;let s=e<=1?e:t>0?e/t:1;return Math.min(w.length-1,Math.max(1,w.length-Math.round(10*s)))}function pt(e,t,s){let n=(e.freeze??[]).join(", ");H(t.typed.freeze??"").join()===(e.freeze??[]).join()&&delete t.typed.freeze;let r=i=>t.typed.freeze=i.target.value,o=i=>s.configure({freeze:H(i.target.value)});return a("label",{class:"tf-option",title:s.live?"names or globs of parameters whose gradients nobody wants, separated by commas":S},"names",a("input",{type:"text",value:t.typed.freeze??n,placeholder:"h.*.mlp.*",spellcheck:"false",disabled:!s.live,oninput:r,onchange:o,"data-testid":"tf-freeze"}))}function H(e){return e.split(",").map(t=>t.trim()).filter(Boolean)}function ut(e,t,s,n){let r=`${e.name} options`,o=e.options.filter(i=>i.value!==i.default).length;return a("details",{class:"tf-more",open:s.passes.has(r),ontoggle:i=>i.target.open?s.passes.add(r):s.passes.delete(r)},a("summary",{"data-testid":`tf-options-${e.name}`},"options",o>0&&a("span",{class:"tf-note"},` ${o} set`)),e.options.map(i=>a("div",{class:"tf-more-option"},ht(e,i,t,s,n),mt(i))))}function ht(e,t,s,n,r){let o=`${e.name}.${t.name}`;n.typed[o]===t.value&&delete n.typed[o];let i=c=>r.configure(gt(e.name,t.name,c,s)),l={disabled:!r.live,"data-testid":`tf-option-${e.name}-${t.name}`},d=t.kind==="switch"?a("input",{...l,type:"checkbox",checked:t.value,onchange:c=>i(c.target.checked)}):a("input",{...l,type:"text",inputmode:t.kind==="number"?"decimal":"text",spellcheck:"false",value:n.typed[o]??t.value,placeholder:String(t.default||"none"),oninput:c=>n.typed[o]=c.target.value,onchange:c=>i(c.target.value.trim()||t.default)});return a("label",{class:"tf-option",title:r.live?null:S},a("span",{class:"tf-option-name"},t.name),d)}function mt(e){let t=e.kind==="switch"?e.default?"on":"off":e.default||"none";return a("p",{class:"tf-note"},e.help,e.help&&" ",`(default: ${t})`)}function gt(e,t,s,n){let r=e==="remat"?"remat_options":e,o=n[r];return{[r]:{...typeof o=="object"?o:{},[t]:s}}}var bt=.5,q=8,xt=40;function R(e,t,s,n){let r=t.error?.panel==="passes"?t.error:null,o=e.passes.some(i=>i.name===r?.at);return a("section",{class:"tf-passes","aria-label":"Passes","aria-busy":String(t.busy==="passes")},a("h3",null,"Passes"),e.passes.map(i=>wt(i,e,s,n,r?.at===i.name?r.message:null)),r&&!o&&U(r.message),zt(e.call))}function U(e){return a("p",{class:"tf-error",role:"alert","data-testid":"tf-error-passes"},e)}function wt(e,t,s,n,r){let o=`tf-${e.name}-${Math.random().toString(36).slice(2,8)}`;return a("div",{class:`tf-pass${e.enabled?"":" tf-off"}`,"data-testid":`tf-pass-${e.name}`},a("div",{class:"tf-pass-head"},a("input",{type:"checkbox",role:"switch",id:o,class:"tf-switch",checked:e.enabled,disabled:!e.enabled&&e.state!=="off",onchange:()=>n.configure({[e.name]:vt(e)}),"data-testid":`tf-toggle-${e.name}`}),a("label",{for:o,title:e.help},e.name),e.seconds!==null&&a("span",{class:"tf-note tf-seconds",title:"how long the pass itself took, not the program"},`took ${F(e.seconds)}`)),...e.enabled?I(e,t,s,n):[],r&&U(r),a("div",{class:"tf-effect"},yt(e)),e.error&&a("p",{class:"tf-error",role:"alert"},e.error),e.enabled&&e.decisions.length>0&&kt(e,t,s.passes,n))}function vt(e){return e.name==="freeze"?e.enabled?null:[]:e.name==="remat"?e.enabled?null:bt:!e.enabled}function yt(e){if(!e.enabled)return[a("span",{class:"tf-note"},e.state)];if(!e.ops||!e.saved_bytes)return[];let t=e.ops[1]-e.ops[0],s=e.saved_bytes[1]-e.saved_bytes[0];return t===0&&s===0?[a("span",{class:"tf-note"},"same size")]:[t!==0&&a("span",{class:t<0?"tf-gain":"tf-cost"},`${$(t)} ops`),s!==0&&a("span",{class:s<0?"tf-gain":"tf-cost"},`keeps ${p(Math.abs(s))} ${s<0?"less":"more"} for backward`)].filter(n=>n!==!1)}function kt(e,t,s,n){let r=e.decisions.slice(0,xt),o=e.decisions.length-r.length,i=e.decisions.reduce((l,d)=>l+d.values.length,0);return a("details",{class:"tf-reasons",open:s.has(e.name),ontoggle:l=>l.target.open?s.add(e.name):s.delete(e.name)},a("summary",{"data-testid":`tf-reasons-${e.name}`},x(i,"decision")),a("ul",null,r.map(l=>St(l,n))),o>0&&a("p",{class:"tf-note"},`and ${x(o,"more reason")}: ${$t(e,t)}`))}function $t({name:e},{call:t,passes:s}){if(!t)return"re-run with `-o c` to print them";let n=s.filter(r=>r.enabled).findIndex(r=>r.name===e);return`\`print(${t}.steps[${n}])\` has all`}function St(e,t){let s=e.values.length-q;return a("li",null,a("span",{class:"tf-action"},e.action,e.values.length>1&&` × ${e.values.length}`),e.nbytes>0&&a("span",{class:"tf-note"},` ${p(e.nbytes)}`),a("span",{class:"tf-why"},e.reason),a("span",{class:"tf-chips"},e.values.slice(0,q).map(n=>N(n,t)),s>0&&a("span",{class:"tf-note"},`+${s}`)))}function N(e,t){return a("button",{class:"tf-chip",onclick:()=>t.select(e)},e)}function zt(e){if(!e)return a("p",{class:"tf-note","data-testid":"tf-call"},"re-run with ",a("code",null,"-o c")," to use it in Python");let t=a("button",{class:"tf-chip",title:"copy"},"copy");return t.onclick=()=>O(e,t),a("div",{class:"tf-call"},a("span",{class:"tf-label"},"In Python"),a("code",{"data-testid":"tf-call"},e),t)}async function O(e,t){try{await navigator.clipboard.writeText(e),t.textContent="copied"}catch{t.textContent="select the text and press Ctrl+C"}setTimeout(()=>t.textContent="copy",1500)}var V=12;function W(e,t,s){let n=t.values[e],r={class:"tf-details","data-testid":"tf-details","aria-live":"polite"};return n?a("div",r,a("div",{class:"tf-facts"},a("b",{class:"tf-name"},e),a("code",null,n.type),a("span",null,p(n.nbytes)),a("span",null,n.op),a("span",{class:"tf-note"},n.phase),n.saved&&a("span",{class:"tf-badge"},"saved for backward"),n.removed&&a("span",{class:"tf-badge"},"removed by a pass"),a("button",{class:"tf-chip tf-close","aria-label":"clear the selection",onclick:()=>s.select("")},"×")),n.source&&z("line",a("code",{class:"tf-source"},n.source)),n.module&&z("module",a("code",null,`${n.module}: ${n.module_type}`)),A("reads",n.reads,s),A("read by",n.uses,s),A(n.phase==="forward"?"backward twin":"forward twin",n.twins,s),...Tt(e,t)):a("div",r,a("span",{class:"tf-note"},"Click a value, or walk with ↑ ↓, to see who reads it and what was decided about it."))}function z(e,...t){return a("div",{class:"tf-fact"},a("span",{class:"tf-label"},e),a("span",{class:"tf-chips"},...t))}function A(e,t,s){if(t.length===0)return null;let n=t.length-V;return z(e,...t.slice(0,V).map(r=>N(r,s)),n>0?a("span",{class:"tf-note"},`+${n}`):"")}function Tt(e,t){return t.passes.flatMap(s=>s.decisions.filter(n=>n.values.includes(e)).map(n=>z(s.name,a("span",null,a("span",{class:"tf-action"},n.action),` ${n.reason}`))))}var j=100,_t={" ":"","+":"+","-":"−","~":"~"},Mt=/("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(torch\.ops\.\w+\.\w+(?:\.\w+)?)|([A-Za-z_]\w*)|(\d[\w.]*(?:e-?\d+)?)/g,Ct=/^\s*\w+ = \w+\[\d+\]$/,Nt=new Set(["def","return","del","None","True","False","import","from","as"]),T=class{constructor(t){this.panes={forward:new _("Forward",t),backward:new _("Backward",t)},this.diff=a("input",{type:"checkbox",checked:!0,"data-testid":"tf-diff",onchange:()=>this.redraw()});let s=a("div",{class:"tf-toolbar"},a("span",{class:"tf-note"},"Changes against the trace as captured"),a("label",null,this.diff,"show removed lines"));this.element=a("div",{class:"tf-code-panel"},s,a("div",{class:"tf-panes"},this.panes.forward.element,this.panes.backward.element)),this.view=null}draw(t){this.view?.payload!==t.payload&&(this.view=t,this.redraw())}redraw(){if(!this.view)return;let{payload:t}=this.view,s=new Set(t.kernels.map(n=>n.name));this.panes.forward.show(t.forward,t.values,s,this.diff.checked),this.panes.backward.show(t.backward,t.values,s,this.diff.checked),this.mark(this.view)}mark(t){this.view=t;let s=t.payload.values[t.selected]?.twins??[];this.panes.forward.highlight(t.selected,s),this.panes.backward.highlight(t.selected,s)}},_=class{constructor(t,s){this.act=s,this.tokens=new Map,this.rows=new Map,this.kernels=new Set,this.count=a("span",{class:"tf-note"}),this.changes=a("span",{class:"tf-changes"}),this.body=a("div",{class:"tf-code",tabindex:"0",role:"group","aria-label":`${t} trace`,"data-testid":`tf-code-${t.toLowerCase()}`}),this.body.addEventListener("click",n=>this.onClick(n)),this.body.addEventListener("keydown",n=>this.onKey(n)),this.inputsOpen=!1,this.element=a("section",{class:"tf-pane"},a("div",{class:"tf-pane-head"},a("h3",null,t),this.count,this.changes),this.body)}show(t,s,n,r){this.kernels=n,this.tokens.clear(),this.rows.clear();let o=(r?t.lines:t.lines.filter(f=>f.diff!=="-")).map((f,u,lt)=>At(f,lt[u+1],s)),i=f=>f.map(u=>this.row(u,s,r)),l=o.filter(f=>f.kind!=="input"&&f.kind!=="signature"),d=[];for(let f=0;f<l.length;f+=j){let u=a("div",{class:"tf-chunk"},i(l.slice(f,f+j)));u.style.containIntrinsicHeight=`auto ${18*j}px`,d.push(u)}let c=o.filter(f=>f.kind==="input");this.body.replaceChildren(...i(o.filter(f=>f.kind==="signature")),this.inputs(c,i(c),r),...d);let[g,b]=t.ops;this.count.textContent=g===b?`${b} ops`:`${g} → ${b} ops`,this.changes.replaceChildren(...t.added?[a("span",{class:"tf-plus"},`+${t.added}`)]:[],...t.removed?[a("span",{class:"tf-minus"},`−${t.removed}`)]:[]),this.changes.title=`lines against the unoptimised trace; ${$(b-g)} ops`}inputs(t,s,n){let r=l=>t.filter(d=>d.diff===l).length,[o,i]=[r("+"),r("-")];return a("details",{class:"tf-inputs",open:this.inputsOpen,ontoggle:l=>this.inputsOpen=l.target.open},a("summary",null,x(t.length-i,"input"),n&&o>0&&a("span",{class:"tf-plus"},` +${o}`),n&&i>0&&a("span",{class:"tf-minus"},` −${i}`)),a("div",{class:"tf-chunk"},s))}row(t,s,n){let r=n?t.diff:" ",o=`tf-line tf-is-${t.kind}${r==="-"?" tf-del":r==="+"?" tf-add":r==="~"?" tf-mod":""}`,i=t.kind==="op",l=a("div",{class:`${o}${i&&Ct.test(t.code)?" tf-is-item":""}`,"data-defines":t.value||null},a("span",{class:"tf-glyph","aria-label":{"+":"added","-":"removed","~":"changed"}[r.trim()]},_t[r]),a("code",null,...this.paint(t.code,s),!i&&t.comment&&a("span",{class:"tf-type"},t.comment)),i&&t.comment&&Ot(t.comment));return t.value&&(t.diff!=="-"||!this.rows.has(t.value))&&this.rows.set(t.value,l),l}paint(t,s){let n=[],r=0;for(let o of t.matchAll(Mt)){let[i,l,d,c,g]=o,b=l?"string":d?"op":g?"number":Nt.has(i)?"keyword":"",f=!!c&&this.kernels.has(i),u=!!c&&!f&&Object.hasOwn(s,i);!b&&!u&&!f||(n.push(t.slice(r,o.index)),n.push(u?this.token(i):f?Pt(i):d?jt(i):a("span",{class:`tf-${b}`},i)),r=o.index+i.length)}return n.push(t.slice(r)),n}token(t){let s=a("span",{class:"tf-value","data-value":t},t),n=this.tokens.get(t);return n?n.push(s):this.tokens.set(t,[s]),s}highlight(t,s){for(let i of this.body.querySelectorAll(".tf-selected, .tf-current, .tf-twin"))i.classList.remove("tf-selected","tf-current","tf-twin");if(!t)return;for(let i of this.tokens.get(t)??[])i.classList.add("tf-selected");this.rows.get(t)?.classList.add("tf-current");for(let i of s)this.rows.get(i)?.classList.add("tf-twin");let n=this.rows.get(t),r=s.map(i=>this.rows.get(i)).find(Boolean),o=n?.classList.contains("tf-is-op")?n:r??n??this.tokens.get(t)?.[0];o&&(o.closest("details")?.setAttribute("open",""),this.reveal(o),requestAnimationFrame(()=>this.reveal(o)))}reveal(t){let s=this.body.getBoundingClientRect(),n=t.getBoundingClientRect();n.top>=s.top&&n.bottom<=s.bottom||(this.body.scrollTop+=n.top-s.top-s.height/3)}onClick(t){let s=t.target,n=s.closest("[data-kernel]");if(n)return this.act.openKernel(n.dataset.kernel);let r=s.closest("[data-value]"),o=s.closest("[data-defines]"),i=r?.dataset.value??o?.dataset.defines;i?this.act.select(i):s.closest(".tf-is-signature, .tf-is-return, .tf-is-free")?.classList.toggle("tf-unfolded")}onKey(t){if(t.key==="Escape")return this.act.select("");let s=t.key==="ArrowDown"?1:t.key==="ArrowUp"?-1:0;if(!s||this.rows.size===0)return;t.preventDefault(),t.stopPropagation();let n=[...this.rows].filter(([,i])=>!i.closest("details:not([open])")).map(([i])=>i),r=n.findIndex(i=>this.rows.get(i)?.classList.contains("tf-current")),o=r<0?s>0?0:n.length-1:Math.min(n.length-1,Math.max(0,r+s));this.act.select(n[o])}};function Ot(e){let[t,...s]=e.replace(/^# /,"").split("  ");return a("code",{class:"tf-types",title:e.slice(2)},a("span",{class:"tf-type"},t),a("span",{class:"tf-note"},`  ${s.join("  ")}`))}function At(e,t,s){if(e.kind!=="group"||!t)return e;let{module:n,module_type:r}=s[t.value]??{module:"",module_type:""};return/(^|\.)\d+$/.test(n)&&e.comment.startsWith(`# ${n}  `)?{...e,comment:e.comment.replace(n,`${n} (${r})`)}:e}function jt(e){let t="torch.ops.";return a("span",{class:"tf-op",title:e},a("span",{class:"tf-prefix"},t),e.slice(t.length))}function Pt(e){return a("span",{class:"tf-kernel","data-kernel":e,title:"show the Triton source"},e)}function J(e,t,s,n){let{ops:r,saved_bytes:o,kernels:i}=e.summary,l=`unique · ${x(i.launches,"launch","launches")}`;return a("header",{class:"tf-verdict","data-testid":"tf-verdict"},Bt(e,s),v("saved","Saved for backward",G(p(o[0]),p(o[1])),Y(o[0],o[1],e.blocked)),v("ops","Operators",G(r[0],r[1]),Y(r[0],r[1],e.blocked)),v("kernels","Triton kernels",[a("b",null,i.unique)],i.unique>0?P(l):null),Et(e,t,s,n),e.blocked&&a("p",{class:"tf-blocked",role:"status","data-testid":"tf-blocked"},e.blocked))}function v(e,t,s,n,r){return a("div",{class:`tf-tile${r?` tf-${r}`:""}`,"data-testid":`tf-tile-${e}`},a("span",{class:"tf-label"},t),a("span",{class:"tf-figure"},s),n)}function G(e,t){return e===t?[a("b",null,t)]:[a("span",{class:"tf-was"},e),a("span",{class:"tf-arrow","aria-label":"to"},"→"),a("b",null,t)]}function P(e){return a("span",{class:"tf-note"},e)}function Y(e,t,s){let n=s?"same":t<e?"better":t>e?"worse":"same";return a("span",{class:`tf-pill tf-${n}`},D(e,t)||"nothing to compare")}function Bt({timing:e,kernels:t,runs_triton:s},n){let r=e?.rows.find(g=>g.label==="step")??e?.rows.at(-1);if(!e||!r?.variant_ms)return v("time","Step time",[a("span",{class:"tf-was"},"not measured")],null);let i=[...r.baseline_ms?[a("span",{class:"tf-was"},h(r.baseline_ms.median)),a("span",{class:"tf-arrow"},"→")]:[],a("b",null,h(r.variant_ms.median)),a("span",{class:"tf-unit"},"ms")],l=n?"of other passes: measure again":"of other passes: run the cell in a notebook to measure these passes",d=!s&&t.length>0&&P("Triton kernels did not run: CPU"),c=a("span",{class:"tf-below"},B(r),P(e.stale?l:e.provenance),d);return v("time","Step time",i,c,e.stale?"stale":"")}function B(e){let{median:t,low:s,high:n}=e.ratio,r=e.verdict==="faster"?"better":e.verdict==="slower"?"worse":null,o=`optimised / captured: ${t.toFixed(2)}; 95 % interval ${s.toFixed(2)} to ${n.toFixed(2)}`,i=r?`${t.toFixed(2)}× the time`:e.verdict;return a("span",{class:`tf-pill tf-${r??"same"}`,title:o},i,a("small",null,` ${s.toFixed(2)}–${n.toFixed(2)}`))}function Et({timing:e,blocked:t},s,n,r){if(!n)return a("span",{class:"tf-static","data-testid":"tf-static"},"saved page");let o=s.busy==="timing",i=o?"Measuring…":e?"Measure again":"Measure",l=!e||e.stale,d=o&&a("progress",{max:1,...s.progress===null?{}:{value:s.progress}});return a("div",{class:"tf-measure"},a("button",{class:`tf-button${l?" tf-primary":""}`,onclick:r,disabled:s.busy!==""||t!==null,title:t,"data-testid":"tf-measure"},i),d,o&&a("span",{class:"tf-note"},s.text))}var Lt="Not measured yet. Measuring replays the recorded traces; your code is not run again.",X="Run the cell in a notebook to measure these passes.";function Kt(e,t,s){let{timing:n}=e,r=t.error?.panel==="timing"?t.error.message:null,o=r&&a("p",{class:"tf-error",role:"alert","data-testid":"tf-error-timing"},r);if(!n)return a("div",null,o,a("p",{class:"tf-note"},e.blocked??(s?Lt:`Not measured. ${X}`)));let i=Math.max(...n.rows.flatMap(l=>[l.baseline_ms?.high??0,l.variant_ms?.high??0]))||1;return a("div",{class:n.stale?"tf-stale":""},o,n.stale&&a("p",{class:"tf-warn"},`These times are of ${n.config}. ${s?"Measure again for the passes chosen now.":X}`),a("table",{class:"tf-table tf-timing","data-testid":"tf-timing"},tt(["","as captured","optimised","","optimised / captured"],[1,2]),a("tbody",null,n.rows.map(l=>Ft(l,i)))),a("p",{class:"tf-note"},`${n.provenance}. Median in ms, with its 95 % interval; bars share one scale.`),!e.runs_triton&&e.kernels.length>0&&a("p",{class:"tf-note"},"Triton kernels did not run: CPU. Both programs ran ATen operators."),n.notes.map(l=>a("p",{class:"tf-note"},l)))}function Ft(e,t){return a("tr",null,a("th",{scope:"row"},e.label),a("td",{class:"tf-right"},Z(e.baseline_ms)),a("td",{class:"tf-right"},Z(e.variant_ms)),a("td",{class:"tf-bars"},Q(e.baseline_ms,t,"was"),Q(e.variant_ms,t,"is")),a("td",null,B(e)))}function Z(e){return e?a("span",null,h(e.median),a("small",{class:"tf-note"},` ${h(e.low)}–${h(e.high)}`)):a("span",{class:"tf-note"},"not measured")}function Q(e,t,s){if(!e)return null;let n=a("i",null);n.style.left=`${100*e.low/t}%`,n.style.width=`${100*(e.high-e.low)/t}%`;let r=a("b",null);return r.style.width=`${100*e.median/t}%`,a("div",{class:`tf-bar tf-bar-${s}`,"aria-hidden":"true"},r,n)}function tt(e,t){return a("thead",null,a("tr",null,e.map((s,n)=>a("th",{scope:"col",class:t.includes(n)?"tf-right":null},s))))}function Dt(e,t){if(e.kernels.length===0)return a("p",{class:"tf-note"},e.config.fuse?"No region of this trace became a Triton kernel; the decisions of `fuse` say why.":"Switch `fuse` on to turn regions into Triton kernels.");let s=e.kernels.find(r=>r.time_us!==null),n=e.runs_triton?"No times of single kernels: press Measure.":"No times: a CPU never runs Triton kernels, it runs their ATen operators. Bytes are of one launch.";return a("div",null,a("table",{class:"tf-table","data-testid":"tf-kernels"},tt(["kernel","launches","reads","writes","time of one","operators"],[1,2,3,4]),a("tbody",null,e.kernels.flatMap(r=>Ht(r,t)))),a("p",{class:"tf-note"},s?`Times: ${s.provenance}, the mean over a kernel's launches. Bytes are of one launch.`:n))}function Ht(e,t){let s=a("tr",{class:"tf-kernel-source",hidden:!t.has(e.name)},a("td",{colspan:6},It(e))),n=a("button",{class:"tf-disclose","aria-expanded":String(t.has(e.name)),"data-testid":`tf-kernel-${e.name}`},e.name);n.onclick=()=>{s.hidden=!s.hidden,n.setAttribute("aria-expanded",String(!s.hidden)),s.hidden?t.delete(e.name):t.add(e.name)};let r=e.time_us===null?"":`${h(e.time_us)} µs`;return[a("tr",null,a("th",{scope:"row"},n),a("td",{class:"tf-right"},e.calls),a("td",{class:"tf-right"},p(e.nbytes_read)),a("td",{class:"tf-right"},p(e.nbytes_written)),a("td",{class:"tf-right"},r),a("td",{class:"tf-ops",title:e.ops.join(" ")},e.ops.join(" "))),s]}function It(e){let t=a("button",{class:"tf-chip tf-copy"},"copy");return t.onclick=()=>O(e.source,t),a("div",{class:"tf-block"},t,a("pre",{tabindex:"0","data-testid":"tf-kernel-text"},e.source))}function qt(e){let t=Object.entries(e.environment);return a("div",{class:"tf-notes","data-testid":"tf-notes"},e.notes.length===0&&a("p",{class:"tf-note"},"No guards: nothing that the cell read back to Python is baked into the trace."),e.notes.length>0&&a("ul",null,e.notes.map(s=>a("li",{class:`tf-${s.kind}`},s.text))),t.length>0&&a("dl",null,t.flatMap(([s,n])=>[a("dt",null,s),a("dd",null,n)])))}var y=class{constructor(t){this.content=t,this.element=a("div",{class:"tf-table-panel"})}draw(t){this.element.replaceChildren(this.content(t))}mark(){}},et=()=>new y(e=>Kt(e.payload,e.status,e.live)),st=(e,t)=>new y(s=>Dt(s.payload,t.kernels)),at=()=>new y(e=>qt(e.payload));var nt=`/* Colours come from JupyterLab's theme where there is one; light-dark() has the page's own for the rest. */
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
/* One screen: the columns share a height, and each scrolls by itself. */
.tf-columns { display: grid; grid-template-columns: 232px minmax(0, 1fr) 300px; height: var(--tf-height, 560px); }
.tf-columns > * { min-width: 0; min-height: 0; }
.tf-side { border-right: 1px solid var(--tf-line); background: var(--tf-raised); overflow: auto; }
.tf-aside { border-left: 1px solid var(--tf-line); background: var(--tf-raised); overflow: auto; }
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

/* tabs */
.tf-main { display: flex; flex-direction: column; }
.tf-tabs { display: flex; flex: none; gap: 4px; padding: 0 10px; border-bottom: 1px solid var(--tf-line); background: var(--tf-raised); overflow-x: auto; scrollbar-width: none; }
.tf-tabs button { flex: none; border: 0; background: none; padding: 8px 8px 6px; border-bottom: 2px solid transparent; cursor: pointer; color: var(--tf-soft); }
.tf-tabs button:hover { color: var(--tf-text); }
.tf-tabs button[aria-selected="true"] { color: var(--tf-text); font-weight: 600; border-bottom-color: var(--tf-brand); }
.tf-tabs :focus-visible { outline-offset: -2px; }
.tf-tab-body { flex: 1; min-height: 0; }
/* A panel fills the tab and scrolls inside. */
.tf-tab-body > * { height: 100%; overflow: auto; }
.tf-table-panel { padding: 10px 16px 14px; }

/* code */
.tf-code-panel { display: flex; flex-direction: column; }
.tf-toolbar { display: flex; justify-content: space-between; gap: 12px; padding: 7px 14px; border-bottom: 1px solid var(--tf-line); }
.tf-toolbar label { display: inline-flex; align-items: center; gap: 6px; font-size: 12px; color: var(--tf-soft); cursor: pointer; }
.tf-toolbar input { accent-color: var(--tf-brand); }
.tf-panes { flex: 1; min-height: 0; display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
.tf-pane { min-width: 0; min-height: 0; display: flex; flex-direction: column; }
.tf-pane + .tf-pane { border-left: 1px solid var(--tf-line); }
.tf-pane-head { display: flex; align-items: baseline; gap: 10px; padding: 7px 14px; background: var(--tf-raised); border-bottom: 1px solid var(--tf-line); }
.tf-changes { margin-left: auto; display: flex; gap: 8px; font: 600 12px var(--tf-mono); }
.tf-plus { color: var(--tf-good); }
.tf-minus { color: var(--tf-bad); }
.tf-code { flex: 1; min-height: 0; overflow: auto; padding: 6px 0; line-height: 18px; tab-size: 4; }
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
.tf-details { padding: 10px 14px; min-height: 37px; }
.tf-facts { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 14px; font-size: 12px; }
.tf-name { font-family: var(--tf-mono); font-size: 13px; overflow-wrap: anywhere; }
.tf-close { margin-left: auto; }
.tf-fact { display: grid; grid-template-columns: 74px minmax(0, 1fr); gap: 8px; align-items: baseline; padding-top: 4px; font-size: 12px; }
.tf-source { overflow-wrap: anywhere; }

/* tables */
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
@container (max-width: 1160px) {
  .tf-columns { grid-template-columns: 232px minmax(0, 1fr); grid-template-rows: minmax(0, 1fr) auto; }
  .tf-side { grid-row: 1 / 3; }
  .tf-aside { border-left: 0; border-top: 1px solid var(--tf-line); max-height: 200px; }
}
@container (max-width: 920px) {
  .tf-columns { grid-template-columns: minmax(0, 1fr); grid-template-rows: none; height: auto; }
  .tf-side { grid-row: auto; border-right: 0; border-bottom: 1px solid var(--tf-line); }
  .tf-passes { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 0 20px; }
  .tf-passes > h3, .tf-passes > .tf-call, .tf-passes > .tf-error { grid-column: 1 / -1; }
  .tf-main { height: 480px; }
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
`;var m=[{id:"code",label:()=>"Code",make:e=>new T(e)},{id:"kernels",label:({kernels:e})=>`Kernels ${e.length}`,make:st},{id:"timing",label:()=>"Timing",make:et},{id:"notes",label:({notes:e})=>`Notes ${e.length||""}`,make:at}],rt=[nt].join(`
`);var ot={busy:"",progress:null,text:"",error:null},E=class{constructor(t){this.payloads=t,this.state={payload:t[0],selected:"",status:ot,live:!1,timeline:null},this.listeners=new Map}get(t){return this.state[t]}set(t,s){this.state[t]=s;for(let n of this.listeners.get(`change:${t}`)??[])n()}save_changes(){}on(t,s){this.listeners.set(t,(this.listeners.get(t)??new Set).add(s))}off(t,s){this.listeners.get(t)?.delete(s)}send(t){if(t.type!=="configure")return;let s=this.find(t.changes);s&&this.set("payload",s);let[n]=Object.keys(t.changes),r=s?null:{panel:"passes",at:n,message:Vt(this.state.payload,t.changes)};this.set("status",{...ot,error:r})}holds(t){return this.find(t)!==void 0}find(t){let s={...this.state.payload.config,...t};return this.payloads.find(n=>Ut(n.config,s))}};function Ut(e,t){return Object.keys(e).every(s=>JSON.stringify(e[s])===JSON.stringify(t[s]))}function Vt({config:e,passes:t},s){let n={...e,...s};return`This saved page does not hold the combination “${t.map(o=>o.name).filter(o=>n[o]!==null&&n[o]!==!1).join(" + ")||"no pass"}” with these options: run the cell in a notebook to see it.`}function Wt(e,t,s){e({model:new E(t),el:s})}var K=class{constructor(t,s){this.model=t,this.matches=null,this.shown=t.get("status"),this.open={passes:new Set,kernels:new Set,typed:{}},this.act={configure:r=>this.ask("passes",{type:"configure",changes:r}),measure:()=>this.ask("timing",{type:"measure"}),select:r=>this.select(r),openTab:r=>this.openTab(r),openKernel:r=>this.openKernel(r),search:()=>{},ask:(r,o)=>this.ask(r,o),live:t.get("live"),holds:r=>t.holds?.(r)??!0},this.panels=new Map,this.outdated=new Set,this.tab=m[0].id,this.slots={verdict:a("div"),passes:a("div",{class:"tf-side"}),tabs:a("div",{class:"tf-tabs",role:"tablist","aria-label":"Panels"}),body:a("div",{class:"tf-tab-body",role:"tabpanel",id:Gt("tf-panel")}),details:a("div",{class:"tf-aside"})};let n=a("div",{class:"tf-main"},this.slots.tabs,this.slots.body);this.root=a("div",{class:"tf","data-testid":"tf-root"},a("style",null,rt),a("div",{class:"tf-frame"},this.slots.verdict,a("div",{class:"tf-columns"},this.slots.passes,n,this.slots.details))),this.root.addEventListener("keydown",r=>r.stopPropagation()),s.append(this.root)}get view(){let{model:t,matches:s}=this;return{payload:t.get("payload"),status:t.get("status"),selected:t.get("selected"),live:t.get("live"),timeline:t.get("timeline"),matches:s}}ask(t,s){this.root.dataset.busy=t,this.model.send(s)}destroy(){for(let t of this.panels.values())t.destroy?.()}drawAll(){this.drawVerdict(),this.drawSide(),this.drawTabs();for(let t of this.panels.keys())this.outdated.add(t);this.drawPanel(),this.drawDetails(),this.root.dataset.ready="1"}drawStatus(){let{status:t}=this.view,s=t.busy===this.shown.busy&&t.error===this.shown.error;if(this.drawVerdict(),!s){this.drawSide(),t.error?.panel==="timing"&&this.openTab("timing");for(let n of this.panels.keys())this.outdated.add(n);this.drawPanel()}}drawVerdict(){let{payload:t,status:s,live:n}=this.view;this.root.dataset.busy=s.busy,this.swap(this.slots.verdict,J(t,s,n,this.act.measure))}drawSide(){let{payload:t,status:s}=this.view;this.shown=s,this.swap(this.slots.passes,R(t,s,this.open,this.act))}drawTabs(){let{payload:t}=this.view,s=m.map(({id:n,label:r})=>a("button",{role:"tab","aria-selected":String(n===this.tab),"aria-controls":this.slots.body.id,tabindex:n===this.tab?"0":"-1",onclick:()=>this.openTab(n),onkeydown:o=>this.onTabKey(o),"data-testid":`tf-tab-${n}`},r(t)));this.swap(this.slots.tabs,...s)}drawPanel(){let t=m.find(({id:n})=>n===this.tab)??m[0],s=this.panels.get(t.id);s||(s=t.make(this.act,this.open),this.panels.set(t.id,s),this.outdated.add(t.id)),this.slots.body.firstChild!==s.element&&this.slots.body.replaceChildren(s.element),this.outdated.delete(t.id)&&s.draw(this.view),s.mark(this.view)}drawDetails(){let{selected:t,payload:s}=this.view;this.swap(this.slots.details,W(t,s,this.act))}drawSelection(){this.panels.get(this.tab)?.mark(this.view),this.drawDetails()}swap(t,...s){let n=t.contains(document.activeElement)?document.activeElement.dataset.testid:void 0;t.replaceChildren(...s),n&&L(t,n)?.focus({preventScroll:!0})}openTab(t){this.tab=t,this.drawTabs(),this.drawPanel()}onTabKey(t){let s=m.findIndex(({id:r})=>r===this.tab),n={ArrowLeft:s-1,ArrowRight:s+1,Home:0,End:-1}[t.key];n!==void 0&&(t.preventDefault(),this.openTab((m.at(n)??m[0]).id),L(this.slots.tabs,`tf-tab-${this.tab}`)?.focus())}openKernel(t){this.open.kernels.add(t),this.outdated.add("kernels"),this.openTab("kernels");let s=L(this.slots.body,`tf-kernel-${t}`);s?.scrollIntoView({block:"nearest"}),s?.focus({preventScroll:!0})}select(t){this.model.set("selected",t),this.model.save_changes()}};function L(e,t){return e.querySelector(`[data-testid="${CSS.escape(t)}"]`)}var it=0;function Gt(e){return it+=1,`${e}-${it}`}function Yt({model:e,el:t}){let s=new K(e,t),n=[["change:payload",()=>s.drawAll()],["change:status",()=>s.drawStatus()],["change:timeline",()=>s.drawAll()],["change:selected",()=>s.drawSelection()]];for(let[r,o]of n)e.on(r,o);return s.drawAll(),()=>{for(let[r,o]of n)e.off(r,o);s.destroy()}}var Se={render:Yt};export{Se as default,Wt as mountPage};
