// Loads the page again when the server has a newer one; the reader stays at the same place, with the same choices.
function keepNew(version, milliseconds) {
  const key = "swift.kept", inputs = () => [...document.querySelectorAll("#controls input, #controls select")];
  const details = () => [...document.querySelectorAll("details")], marks = () => [...document.querySelectorAll("[id]:not([hidden])")];
  const nameOf = input => `${input.name} ${input.type === "checkbox" ? input.value : ""}`;

  function keep() {
    // The place is kept relative to what is at the top of the window: what is above it may become longer.
    const mark = marks().filter(one => one.getBoundingClientRect().top <= 1 && one.getClientRects().length).at(-1);
    sessionStorage.setItem(key, JSON.stringify({
      mark: mark?.id, top: mark?.getBoundingClientRect().top ?? 0, y: scrollY, open: details().map(one => one.open),
      inputs: Object.fromEntries(inputs().map(input => [nameOf(input), [input.value, input.checked]])),
    }));
  }

  function restore() {
    const kept = JSON.parse(sessionStorage.getItem(key) ?? "null");
    sessionStorage.removeItem(key);
    if (!kept) return;
    details().forEach((one, index) => { one.open = kept.open[index] ?? one.open; });
    for (const input of inputs()) {
      const [value, checked] = kept.inputs[nameOf(input)] ?? [input.value, input.checked];
      if (input.value === value && input.checked === checked) continue;
      Object.assign(input, {value, checked});
      for (const kind of ["input", "change"]) input.dispatchEvent(new Event(kind, {bubbles: true}));
    }
    const mark = kept.mark && document.getElementById(kept.mark);
    scrollTo(0, mark ? scrollY + mark.getBoundingClientRect().top - kept.top : kept.y);
  }

  async function look() {
    try {
      const answer = await fetch("/version", {cache: "no-store"});
      if (!document.hidden && answer.ok && await answer.text() !== version) {
        keep();
        location.reload();
        return;
      }
    } catch { /* the command has ended: the page stays as it is */ }
    setTimeout(look, milliseconds);
  }

  history.scrollRestoration = "manual";
  addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(restore)));
  setTimeout(look, milliseconds);
}
