"use strict";
// values under the pointer, at once and on touch screens; without this script <title> shows them
const tip = document.getElementById("tip");
for (const hit of document.querySelectorAll(".hit")) {
  const title = hit.querySelector("title");
  const text = title.textContent;
  title.remove();
  const show = (event) => {
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY - tip.offsetHeight - 14;
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
  };
  hit.addEventListener("pointerenter", show);
  hit.addEventListener("pointermove", show);
  hit.addEventListener("pointerleave", () => { tip.hidden = true; });
}
// paper has nothing to click
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
