"""How does the page of a run look? Its CSS, beside that of all pages."""

STYLE = """
.aside { color: var(--muted); font-size: 0.85rem; }
.state { margin-top: 1rem; }
.state b { margin-right: 0.5rem; }
.heads { display: grid; gap: 0 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); }
dl { display: grid; gap: 0.5rem; margin: 0.75rem 0;
  grid-template-columns: repeat(auto-fill, minmax(6.4rem, 1fr)); }
dl div { background: var(--panel); border-radius: 6px; padding: 0.45rem 0.6rem; }
dt { color: var(--muted); font-size: 0.8rem; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
pre { background: var(--panel); border-radius: 6px; padding: 0.75rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem; }
td.word { white-space: normal; overflow-wrap: anywhere; min-width: 4rem;
  vertical-align: top; }
td.word:first-child { overflow-wrap: normal; }
.charts { display: grid; gap: 0 2rem; align-items: end;
  grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); }
.chart { margin: 0.75rem 0 0.25rem; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: baseline;
  margin-bottom: 0.9rem; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
figcaption b { font-size: 0.95rem; }
figcaption .unit { color: var(--muted); }
.plot { position: relative; height: 9rem; margin: 0 0.75rem 1.6rem 3.4rem;
  touch-action: pan-y; }
.tall { grid-column: 1 / -1; margin-top: 2rem; }
.tall .plot { height: 20rem; }
.tall figcaption b { font-size: 1.1rem; }
.plot:focus-visible { outline: 2px solid var(--first); outline-offset: 4px; }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; stroke: currentColor; stroke-width: 1.75;
  stroke-linecap: round; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.first { color: var(--first); }
.second { color: var(--second); }
.third { color: var(--third); }
.plot .grid { color: var(--grid); stroke-width: 1; }
.plot .faint { stroke-width: 1; opacity: 0.4; }
.plot .dots { stroke-width: 6; }
.plot .joined { stroke-dasharray: 5 4; stroke-width: 1.25; }
.plot .rule { stroke-width: 1; stroke-dasharray: 3 3; opacity: 0.8; }
.bad { color: var(--bad); }
.changed { color: var(--third); }
.opened { color: var(--muted); }
.x, .y { position: absolute; color: var(--muted); font-size: 0.75rem;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.x { top: calc(100% + 0.25rem); transform: translateX(-50%); }
.y { right: calc(100% + 0.5rem); transform: translateY(50%); line-height: 1; }
.flag { position: absolute; bottom: 100%; width: 9px; height: 9px; margin: 0 0 2px -5px;
  background: currentColor; clip-path: polygon(0 0, 100% 0, 50% 100%); }
.flag.changed { clip-path: polygon(50% 0, 100% 50%, 50% 100%, 0 50%); }
.flag.opened { border-radius: 50%; clip-path: none; width: 7px; height: 7px;
  margin-left: -4px; }
figcaption i, .tip i, .key { display: inline-block; width: 0.9rem; height: 3px;
  background: currentColor; vertical-align: middle; margin-right: 0.35rem;
  flex: none; align-self: center; }
figcaption .dots, .tip .dots { width: 7px; height: 7px; border-radius: 50%; }
.tip .faint { opacity: 0.4; }
.bar { display: flex; height: 1.25rem; margin: 0.25rem 0 0.75rem; border-radius: 4px;
  overflow: hidden; gap: 1px; }
.bar i { background: var(--kind); min-width: 1px; }
.kinds { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: 0.85rem; }
.kinds i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 2px;
  margin-right: 0.35rem; background: var(--kind); }
.step { --kind: var(--good); }
.lost { --kind: var(--bad); }
.compile { --kind: var(--first); }
.evaluate { --kind: var(--third); }
.save { --kind: var(--second); }
.data { --kind: #d1a11f; }
.restore { --kind: #2f9c95; }
.replay { --kind: #8a6fb3; }
.start { --kind: #888c; }
.down, .end { --kind: #8885; }
"""
