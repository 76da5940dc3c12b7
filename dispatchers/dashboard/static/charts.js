// The keyboard on a chart: the arrow keys, Home and End move from minute to minute. Without this script Tab reaches its last one.
"use strict";
(() => {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  document.addEventListener("keydown", (event) => {
    const minute = event.target.closest?.(".minute");
    if (!minute || !(event.key in step)) return;
    event.preventDefault();
    const all = [...minute.parentNode.querySelectorAll(".minute")];
    const next = all[Math.min(Math.max(all.indexOf(minute) + step[event.key], 0), all.length - 1)];
    minute.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
})();
