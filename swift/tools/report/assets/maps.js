// Heat maps of experts' shares: tells the shares of tokens and replicas of the expert and steps under the pointer.
{
  const {maps} = JSON.parse(document.getElementById("data").textContent);

  function tell(map, images, tip, frame, event) {
    const image = images.find(one => {
      const box = one.getBoundingClientRect();
      return event.clientX >= box.left && event.clientX < box.right && event.clientY >= box.top && event.clientY < box.bottom;
    });
    tip.hidden = !image;
    if (!image) return;
    const box = image.getBoundingClientRect(), {steps, bins, merged, tokens, replicas} = map;
    const column = Math.floor((event.clientX - box.left) / box.width * bins / merged);
    const expert = Math.floor((event.clientY - box.top) / box.height * tokens[0].length);
    const at = part => steps[0] + Math.floor((steps[1] - steps[0] + 1) * Math.min(part * merged, bins) / bins);
    const [first, last] = [at(column), at(column + 1) - 1];
    const share = counts => counts[column][expert] === null ? "unknown" : `${(counts[column][expert] / 10).toFixed(1)} %`;
    tip.replaceChildren(...[
      `expert ${expert}, ${first === last ? `step ${first}` : `steps ${first} to ${last}`}`,
      `tokens: ${share(tokens)}`, `replicas: ${share(replicas)}`,
    ].map(text => Object.assign(document.createElement("div"), {textContent: text})));
    const edge = frame.getBoundingClientRect(), room = frame.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, event.clientX - edge.left + 12))}px`;
    tip.style.top = `${event.clientY - edge.top - tip.offsetHeight - 8}px`;
  }

  for (const figure of document.querySelectorAll("figure[data-maps]")) {
    const frame = figure.querySelector(".frame"), tip = document.createElement("div");
    const images = [...figure.querySelectorAll("svg image")].slice(0, 2);  // the third is the scale of colours
    Object.assign(tip, {className: "tip", hidden: true});
    frame.append(tip);
    frame.addEventListener("pointermove", event => tell(maps[figure.dataset.maps], images, tip, frame, event));
    frame.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}
