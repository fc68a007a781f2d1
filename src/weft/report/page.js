// Draws the page from its data. All text goes into the page as text nodes: no string becomes HTML.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const LANGUAGES = ["en", "zh-CN"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let language = (navigator.language || "en").toLowerCase().startsWith("zh") ? 1 : 0;
  let charts = [];

  // ---- words and numbers -----------------------------------------------------------------------

  function say(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "object") return String(value);
    if ("n" in value) return format(value.n, value.u);
    const words = page.texts[value.t][language];
    return words.replace(/\{(\w+)\}/g, (_, name) => say((value.p || {})[name]));
  }

  function digits(value, most) {
    const options = { maximumSignificantDigits: most };
    return new Intl.NumberFormat(LANGUAGES[language], options).format(value);
  }

  function scaled(value, units) {
    const [size, name] = units.find(([size]) => Math.abs(value) >= size) || units.at(-1);
    return `${digits(value / size, 3)} ${name}`.trim();
  }

  function format(value, unit) {
    if (unit === "bytes")
      return scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
    if (unit === "share") return `${digits(100 * value, 3)} %`;
    if (unit === "per_s" || unit === "count")
      return scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]);
    if (unit === "s") {
      if (value >= 3600) return `${digits(value / 3600, 3)} h`;
      if (value >= 120) return `${digits(value / 60, 3)} min`;
      return value ? scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) : "0 s";
    }
    return Number.isInteger(value)
      ? new Intl.NumberFormat(LANGUAGES[language]).format(value)
      : digits(value, 4);
  }

  // ---- elements --------------------------------------------------------------------------------

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    for (const child of children.flat(Infinity)) if (child !== null) made.append(child);
    return made;
  }

  function tableOf(head, rows, caption) {
    const numeric = (cell) => typeof cell === "object" && cell !== null && "n" in cell;
    return el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || say({ t: "page.table" }) },
      el(
        "table",
        {},
        caption ? el("caption", {}, caption) : null,
        el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell === null ? "" : say(cell))))),
        el(
          "tbody",
          {},
          rows.map((row) =>
            el(
              "tr",
              {},
              row.map((cell, place) =>
                el(place ? "td" : "th", { ...(place ? {} : { scope: "row" }), ...(numeric(cell) ? { class: "number" } : {}) }, say(cell)),
              ),
            ),
          ),
        ),
      ),
    );
  }

  // ---- charts ----------------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const palette = () => [1, 2, 3, 4, 5, 6].map((n) => colour(`--series-${n}`));
  const KIND_COLOURS = {
    F: 1, B: 3, W: 4, U: 2, "recv-wait": 0, send: 6, reduce: 5, gather: 5, optimizer: 2, fixed: 0,
  };
  const kindColour = (of) => (KIND_COLOURS[of] ? colour(`--series-${KIND_COLOURS[of]}`) : colour("--idle"));

  function tip(lines) {
    return el("div", { class: "tip" }, lines.map((line) => el("div", {}, line)));
  }

  function base(description) {
    return {
      animation: false,
      aria: { enabled: true, label: { description } },
      color: palette(),
      textStyle: { fontFamily: FONT, color: colour("--ink") },
      grid: { left: 18, right: 24, top: 44, bottom: 30, containLabel: true },
      legend: { type: "scroll", top: 4, textStyle: { color: colour("--ink") }, pageTextStyle: { color: colour("--ink") }, inactiveColor: colour("--soft") },
      tooltip: { confine: true, backgroundColor: colour("--card"), borderColor: colour("--line"), textStyle: { color: colour("--ink") } },
    };
  }

  const nameWidth = () => (innerWidth < 640 ? 100 : 210);

  function axis(more) {
    return {
      axisLine: { lineStyle: { color: colour("--soft") } },
      axisLabel: { color: colour("--ink"), hideOverlap: true, ...(more.axisLabel || {}) },
      splitLine: { lineStyle: { color: colour("--line") } },
      nameTextStyle: { color: colour("--soft") },
      ...Object.fromEntries(Object.entries(more).filter(([name]) => name !== "axisLabel")),
    };
  }

  const FONT = 'system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif'; // measured: no "inherit"
  const SYMBOLS = ["circle", "diamond", "triangle", "rect", "roundRect", "pin"];

  const draw = {
    lines(block) {
      const one = block.series.length === 1 && !block.marks.length;
      const option = base(`${say(block.title)}: ${block.series.map((s) => say(s.name)).join(", ")}`);
      const seen = new Set();
      const kept = block.marks.filter(([at, what]) => !seen.has(`${at} ${say(what)}`) && seen.add(`${at} ${say(what)}`));
      const marks = {
        silent: true,
        symbol: "none",
        lineStyle: { color: colour("--bad"), type: "dotted", width: 1.5 },
        label: { color: colour("--ink"), formatter: (m) => m.name, position: "insideEndTop" },
        data: kept.map(([at, what]) => ({ xAxis: at, name: say(what) })),
      };
      const type = block.log ? "log" : "value";
      return {
        ...option,
        legend: { ...option.legend, show: !one },
        grid: { ...option.grid, top: one ? 16 : 44 },
        tooltip: {
          ...option.tooltip,
          trigger: "axis",
          formatter: (found) =>
            tip([`${say(block.x)} ${format(found[0].value[0], "")}`, ...found.map((f) => `${f.seriesName}: ${format(f.value[1], block.unit)}`)]),
        },
        xAxis: axis({ type, name: say(block.x), nameLocation: "middle", nameGap: 28, min: "dataMin", max: "dataMax", splitLine: { show: false }, axisLabel: { formatter: (v) => format(v, "") } }),
        yAxis: axis({ type, scale: true, axisLabel: { formatter: (v) => format(v, block.unit) } }),
        series: block.series.map((s, place) => ({
          type: "line",
          name: say(s.name),
          data: s.x.map((x, i) => [x, s.y[i]]),
          symbol: SYMBOLS[place % SYMBOLS.length],
          symbolSize: s.style === "points" ? 9 : 6,
          showSymbol: s.style === "points" || s.x.length < 30,
          lineStyle: { width: 2, type: s.style === "dashed" || s.style === "points" ? "dashed" : "solid" },
          ...(place === 0 && kept.length ? { markLine: marks } : {}),
        })),
      };
    },

    bars(block) {
      const option = base(`${say(block.title)}: ${block.parts.map((p) => say(p.name)).join(", ")}`);
      return {
        ...option,
        tooltip: {
          ...option.tooltip,
          trigger: "axis",
          axisPointer: { type: "shadow" },
          formatter: (found) => tip([found[0].axisValueLabel, ...found.filter((f) => f.value).map((f) => `${f.seriesName}: ${format(f.value, block.unit)}`)]),
        },
        xAxis: axis({ type: "value", axisLabel: { formatter: (v) => format(v, block.unit) } }),
        yAxis: axis({ type: "category", inverse: true, data: block.groups.map(say), axisLabel: { width: nameWidth(), overflow: "truncate" }, axisTick: { show: false } }),
        series: block.parts.map((p, place) => ({
          type: "bar",
          name: say(p.name),
          data: p.values,
          barMaxWidth: 26,
          ...(block.stacked ? { stack: "all" } : {}),
          itemStyle: { borderColor: colour("--card"), borderWidth: 1 },
          color: palette()[place % 6],
        })),
      };
    },

    heat(block) {
      const values = block.values.flat();
      const most = Math.max(...values), few = block.columns.length <= 16;
      const option = base(say(block.title));
      return {
        ...option,
        legend: { show: false },
        grid: { ...option.grid, top: 12, bottom: 56 },
        tooltip: {
          ...option.tooltip,
          formatter: (f) => tip([`${say(block.rows[f.value[1]])}, ${say(block.columns[f.value[0]])}`, format(f.value[2], block.unit)]),
        },
        xAxis: axis({ type: "category", data: block.columns.map(say), name: say(block.x), nameLocation: "middle", nameGap: 28, splitArea: { show: false } }),
        yAxis: axis({ type: "category", inverse: true, data: block.rows.map(say), axisLabel: { width: nameWidth(), overflow: "truncate" } }),
        visualMap: {
          min: 0,
          max: most || 1,
          orient: "horizontal",
          left: "center",
          bottom: 0,
          itemHeight: 90,
          itemWidth: 10,
          padding: 2,
          show: false,
          inRange: { color: [colour("--heat-0"), colour("--heat-1")] },
        },
        series: [
          {
            type: "heatmap",
            data: block.values.flatMap((row, y) => row.map((v, x) => [x, y, v])),
            itemStyle: { borderColor: colour("--card"), borderWidth: 2 },
            label: { show: few, formatter: (f) => format(f.value[2], block.unit), color: colour("--heat-ink") },
          },
        ],
      };
    },

    timeline(block) {
      const option = base(`${say(block.title)}: ${block.lanes.map(say).join(", ")}`);
      const rows = block.kinds.map((_, of) => block.spans.filter((span) => span[1] === of).map(([lane, , a, b, label]) => [lane, a, b, label]));
      const rect = (params, api) => {
        const lane = api.value(0), from = api.coord([api.value(1), lane]), to = api.coord([api.value(2), lane]);
        const height = Math.min(api.size([0, 1])[1] * 0.72, 26), of = block.kinds[params.seriesIndex][0];
        const wait = !KIND_COLOURS[of];
        const shape = echarts.graphic.clipRectByRect(
          { x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 0.6), height },
          { x: params.coordSys.x, y: params.coordSys.y, width: params.coordSys.width, height: params.coordSys.height },
        );
        const label = rows[params.seriesIndex][params.dataIndex][3]; // api.value reads 0B1 as a binary number
        const shown = !wait && shape && shape.width > 8 * label.length + 2;
        return (
          shape && {
            type: "rect",
            shape,
            style: { fill: kindColour(of), stroke: colour("--card"), lineWidth: 0.5 },
            ...(shown ? { textContent: { style: { text: label, fill: colour("--on-series"), fontSize: 10 } }, textConfig: { position: "inside" } } : {}),
          }
        );
      };
      return {
        ...option,
        color: block.kinds.map(([of]) => kindColour(of)),
        grid: { ...option.grid, bottom: 64 },
        tooltip: {
          ...option.tooltip,
          formatter: (f) => tip([say(block.lanes[f.value[0]]), `${f.seriesName} ${f.value[3]}`, `${format(f.value[1], "s")} – ${format(f.value[2], "s")} (${format(f.value[2] - f.value[1], "s")})`]),
        },
        dataZoom: [{ type: "slider", xAxisIndex: 0, filterMode: "weakFilter", bottom: 6, height: 20, labelFormatter: (v) => format(v, "s"), textStyle: { color: colour("--ink") }, brushSelect: false }],
        xAxis: axis({ type: "value", min: 0, max: "dataMax", axisLabel: { formatter: (v) => format(v, "s") } }),
        yAxis: axis({ type: "category", inverse: true, data: block.lanes.map(say), axisTick: { show: false }, axisLabel: { width: nameWidth(), overflow: "truncate" } }),
        series: block.kinds.map(([of, name], place) => ({
          type: "custom",
          name: say(name),
          renderItem: rect,
          encode: { x: [1, 2], y: 0 },
          itemStyle: { color: kindColour(of) },
          data: rows[place],
          z: KIND_COLOURS[of] ? 3 : 2,
        })),
      };
    },
  };

  function heightOf(block) {
    if (block.kind === "bars") return 90 + Math.max(2, block.groups.length * (block.stacked ? 1 : block.parts.length)) * 30;
    if (block.kind === "heat") return 70 + block.rows.length * 30;
    if (block.kind === "timeline") return 130 + block.lanes.length * 32;
    return 300;
  }

  // The same figures as a table: for who does not see the chart, or wants to copy them.
  function figures(block) {
    const some = (list) => {
      const every = Math.ceil(list.length / 60);
      return list.filter((_, place) => place % every === 0 || place === list.length - 1);
    };
    if (block.kind === "lines") {
      const xs = some([...new Set(block.series.flatMap((s) => s.x))].sort((a, b) => a - b));
      const at = block.series.map((s) => new Map(s.x.map((x, i) => [x, s.y[i]])));
      const cell = (map, x) => (map.has(x) ? { n: map.get(x), u: block.unit } : null);
      return tableOf([block.x, ...block.series.map((s) => s.name)], xs.map((x) => [{ n: x, u: "" }, ...at.map((map) => cell(map, x))]));
    }
    if (block.kind === "bars")
      return tableOf([null, ...block.parts.map((p) => p.name)], block.groups.map((g, i) => [g, ...block.parts.map((p) => ({ n: p.values[i], u: block.unit }))]));
    if (block.kind === "heat")
      return tableOf([block.y, ...block.columns], block.rows.map((r, y) => [r, ...block.values[y].map((v) => ({ n: v, u: block.unit }))]));
    const total = (lane, of) => block.spans.filter((s) => s[0] === lane && s[1] === of).reduce((sum, s) => sum + s[3] - s[2], 0);
    return tableOf([null, ...block.kinds.map((k) => k[1])], block.lanes.map((lane, i) => [lane, ...block.kinds.map((_, of) => ({ n: total(i, of), u: "s" }))]));
  }

  function chart(block) {
    const place = el("div", { class: "chart", tabindex: "0", style: `height:${heightOf(block)}px` });
    const details = el("details", {}, el("summary", {}, say({ t: "page.figures" })));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(figures(block));
    });
    charts.push([place, block]);
    return el(
      "figure",
      { "data-chart": block.kind, class: block.kind === "lines" ? "half" : "" },
      el("figcaption", {}, say(block.title)),
      place,
      block.left_out ? el("p", { class: "note info" }, say({ t: "page.left_out", p: { count: { n: block.left_out } } })) : null,
      details,
    );
  }

  function start([place, block]) {
    const made = echarts.init(place, null, { renderer: "svg", locale: language ? "ZH" : "EN" });
    made.setOption(draw[block.kind](block));
    new ResizeObserver(() => made.resize()).observe(place);
    place.setAttribute("role", "img");
    if (!place.getAttribute("aria-label")) place.setAttribute("aria-label", say(block.title));
    let at = -1; // arrow keys walk over the figures, as a pointer would
    place.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") made.dispatchAction({ type: "hideTip" });
      if (!by) return;
      event.preventDefault();
      const data = made.getOption().series[0].data.length;
      at = Math.min(Math.max(at + by, 0), data - 1);
      made.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: at });
    });
    return made;
  }

  // ---- blocks ----------------------------------------------------------------------------------

  const blocks = {
    lines: chart,
    bars: chart,
    heat: chart,
    timeline: chart,
    note: (b) => el("p", { class: `note ${b.tone}` }, say(b.text)),
    tiles: (b) => el("dl", { class: "tiles" }, b.rows.map(([name, value, tone]) => el("div", { class: `tile ${tone}` }, el("dt", {}, say(name)), el("dd", {}, say(value))))),
    table: (b) => tableOf(b.head, b.rows, b.caption === null ? "" : say(b.caption)),
    code: (b) => el("details", { class: "code" }, el("summary", {}, say(b.caption)), el("pre", { tabindex: "0" }, b.text)),
    columns: (b) => el("div", { class: "columns" }, b.columns.map((c) => el("div", { class: "column" }, el("h3", {}, say(c.title)), c.blocks.map(block)))),
    ranks: (b) =>
      el(
        "ul",
        { class: "ranks", "aria-label": say({ t: "layout.title" }) },
        b.tiles.map((tile) =>
          el(
            "li",
            { class: "rank" },
            el("strong", {}, say({ t: "rank", p: { rank: tile.rank } })),
            el("span", { class: "coords" }, tile.coords.map(([name, at], place) => el("span", { class: `coord c${place % 6}` }, `${name} ${at}`))),
            el("dl", {}, tile.facts.map(([name, value]) => [el("dt", {}, say(name)), el("dd", {}, say(value))])),
          ),
        ),
      ),
  };
  const block = (b) => blocks[b.kind](b);

  // Charts that stand two in a row: one that would stand alone is as wide as two.
  function evenly(shown) {
    let row = [];
    const end = () => {
      if (row.length % 2) row[0].classList.remove("half");
      row = [];
    };
    for (const child of shown.children) child.classList.contains("half") ? row.push(child) : end();
    end();
    return shown;
  }

  // ---- the page --------------------------------------------------------------------------------

  function render() {
    const scrolled = scrollY;
    for (const made of charts) if (made.dispose) made.dispose();
    charts = [];
    document.documentElement.lang = LANGUAGES[language];
    const heading = say({ t: `page.${page.kind}`, p: { name: page.title } });
    document.title = heading;
    const other = el("button", { type: "button", id: "language", lang: LANGUAGES[1 - language] }, ["English", "中文"][1 - language]);
    other.addEventListener("click", () => {
      language = 1 - language;
      render();
      document.getElementById("language").focus();
    });
    const links = page.sections.map((s) => el("a", { href: `#${s.id}` }, say(s.title)));
    document.getElementById("page").replaceChildren(
      el("a", { class: "skip", href: "#summary" }, say({ t: "page.skip" })),
      el("header", {}, el("div", { class: "bar" }, el("h1", {}, heading), other), el("nav", { "aria-label": say({ t: "page.contents" }) }, links)),
      el(
        "main",
        {},
        page.sections.map((s) =>
          el("section", { id: s.id, "aria-labelledby": `${s.id}-title` }, el("h2", { id: `${s.id}-title` }, say(s.title)), s.intro ? el("p", { class: "intro" }, say(s.intro)) : null, evenly(el("div", { class: "blocks" }, s.blocks.map(block)))),
        ),
      ),
      el("footer", {}, say({ t: "page.made", p: { version: page.version } })),
    );
    charts = charts.map(start);
    scrollTo(0, scrolled);
    document.documentElement.dataset.ready = "yes";
  }

  dark.addEventListener("change", render);
  render();
})();
