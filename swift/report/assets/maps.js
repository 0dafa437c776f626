// Heat maps of experts' shares: tells the shares of tokens and replicas of the expert and steps under the pointer, or where
// the arrow keys lead.
{
  const {maps} = JSON.parse(document.getElementById("data").textContent);
  const spoken = document.getElementById("told");

  function texts({steps, bins, merged, tokens, replicas}, {column, expert}) {
    const at = part => steps[0] + Math.floor((steps[1] - steps[0] + 1) * Math.min(part * merged, bins) / bins);
    const [first, last] = [at(column), at(column + 1) - 1];
    const share = counts => counts[column][expert] === null ? "unknown" : `${(counts[column][expert] / 10).toFixed(1)} %`;
    return [`expert ${expert}, ${first === last ? `step ${first}` : `steps ${first} to ${last}`}`,
      `tokens: ${share(tokens)}`, `replicas: ${share(replicas)}`];
  }

  for (const figure of document.querySelectorAll("figure[data-maps]")) {
    const map = maps[figure.dataset.maps], {bins, merged, tokens} = map, numExperts = tokens[0].length;
    const frame = figure.querySelector(".frame"), tip = document.createElement("div");
    const images = [...figure.querySelectorAll("svg image")].slice(0, 2);  // the third is the scale of colours
    let cell = {column: 0, expert: 0};
    Object.assign(tip, {className: "tip", hidden: true});
    frame.append(tip);
    for (const [name, value] of Object.entries({tabindex: 0, role: "group", "aria-describedby": "help",
      "aria-label": figure.querySelector("figcaption").textContent})) frame.setAttribute(name, value);

    function tell(x, y) {
      tip.replaceChildren(...texts(map, cell).map(text => Object.assign(document.createElement("div"), {textContent: text})));
      tip.hidden = false;
      const edge = frame.getBoundingClientRect(), room = frame.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(room, x - edge.left + 12))}px`;
      tip.style.top = `${y - edge.top - tip.offsetHeight - 8}px`;
    }

    frame.addEventListener("pointermove", event => {
      const boxes = images.map(image => image.getBoundingClientRect());
      const box = boxes.find(one => event.clientX >= one.left && event.clientX < one.right && event.clientY >= one.top
        && event.clientY < one.bottom);
      tip.hidden = !box;
      if (!box) return;
      cell = {column: Math.floor((event.clientX - box.left) / box.width * bins / merged),
        expert: Math.floor((event.clientY - box.top) / box.height * numExperts)};
      tell(event.clientX, event.clientY);
    });
    frame.addEventListener("pointerleave", () => { tip.hidden = true; });
    frame.addEventListener("blur", () => { tip.hidden = true; });
    frame.addEventListener("keydown", event => {
      const step = event.shiftKey ? 10 : 1, {column, expert} = cell;
      const moved = {ArrowRight: [column + step, expert], ArrowLeft: [column - step, expert], Home: [0, expert],
        End: [Infinity, expert], ArrowDown: [column, expert + 1], ArrowUp: [column, expert - 1]}[event.key];
      if (!moved || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const within = (value, number) => Math.max(0, Math.min(number - 1, value));
      cell = {column: within(moved[0], tokens.length), expert: within(moved[1], numExperts)};
      const box = images[0].getBoundingClientRect();
      tell(box.left + (cell.column + .5) * merged / bins * box.width, box.top + (cell.expert + .5) / numExperts * box.height);
      spoken.textContent = [...tip.children].map(row => row.textContent).join("; ");
    });
  }
}
