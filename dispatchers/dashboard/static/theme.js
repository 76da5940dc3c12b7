// Applies the chosen colour scheme before the page is drawn. Without a choice the system's scheme applies.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("outbox-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* no storage: the system's scheme applies */ }
})();
