"use strict";
(() => {
  const find = (selector) => document.querySelector(selector);
  const help = find("#help");
  const said = find("#said");
  const show = () => { if (help && !help.open) help.showModal(); };
  const button = find("#show-help");
  if (button && help) { button.hidden = false; button.addEventListener("click", show); }

  // Who speaks to the machine, or hits keys by chance, can switch single keys off.
  const box = find("#keys-on");
  let on = true;
  try { on = localStorage.getItem("preview-keys") !== "off"; } catch { /* nothing is kept then */ }
  if (box) {
    box.checked = on;
    box.addEventListener("change", () => {
      on = box.checked;
      try { localStorage.setItem("preview-keys", on ? "on" : "off"); } catch { /* nothing is kept then */ }
    });
  }

  const follow = (selector) => { const link = find(selector); if (link) link.click(); };
  const focus = (selector) => { const field = find(selector); if (field) { field.focus(); if (field.select) field.select(); } };
  const actions = {
    ArrowRight: () => follow("nav.turn a[rel=next]"),
    ArrowLeft: () => follow("nav.turn a[rel=prev]"),
    n: () => follow("nav.turn a[rel=next]"),
    p: () => follow("nav.turn a[rel=prev]"),
    g: () => focus("#go-to"),
    "/": () => focus(find("#filter") ? "#filter" : "#find-key"),
    o: () => follow(".title a"),
    "?": show,
  };
  document.addEventListener("keydown", (event) => {
    if (!on || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const at = event.target;
    if (at instanceof Element && at.closest("input, textarea, select, audio, video, dialog, [contenteditable]")) return;
    // Arrows are for reading along in a box that scrolls.
    if (at instanceof Element && event.key.startsWith("Arrow") && at.closest(".tokens, pre, .scroll")) return;
    const action = actions[event.key];
    if (action) { event.preventDefault(); action(); }
  });

  const filter = find("#filter");
  if (filter) {
    filter.closest(".filter").hidden = false;
    const rows = [...document.querySelectorAll("#tree tbody tr")];
    const names = rows.map((row) => row.cells[0].textContent.toLowerCase());
    filter.addEventListener("input", () => {
      const wanted = filter.value.trim().toLowerCase();
      let count = 0;
      rows.forEach((row, number) => {
        row.hidden = wanted !== "" && !names[number].includes(wanted);
        if (!row.hidden) count += 1;
      });
      if (said) said.textContent = `${count} of ${rows.length} lines`;
    });
  }

  // The number of a token, for who points at it.
  document.addEventListener("pointerover", (event) => {
    const at = event.target;
    if (!(at instanceof HTMLElement) || at.title || at.tagName !== "SPAN") return;
    const tokens = at.closest(".tokens");
    if (!tokens || at.parentElement.parentElement !== tokens) return;
    if (!tokens.places) tokens.places = new Map([...tokens.querySelectorAll(":scope > * > span")].map((one, n) => [one, n]));
    const number = tokens.places.get(at);
    const ids = tokens.dataset.ids ? tokens.dataset.ids.split(" ")[number] : at.textContent;
    const learned = at.parentElement.tagName === "MARK" ? ", learned" : "";
    at.title = `place ${number}, token ${ids}${learned}`;
  });
})();
