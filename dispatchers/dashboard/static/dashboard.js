// The theme switch, relative times, and the refresh of the live part. Every page works without this script.
"use strict";
(() => {
  const REFRESH_MS = 5000;
  const root = document.documentElement;
  const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* not kept */ } };
  const stored = (name) => { try { return localStorage.getItem(name); } catch { return null; } };

  // --- the theme
  const themes = ["system", "light", "dark"];
  const theme = document.getElementById("theme");
  const showTheme = () => { theme.textContent = `Theme: ${root.dataset.theme || "system"}`; };
  if (theme) {
    theme.hidden = false;
    showTheme();
    theme.addEventListener("click", () => {
      const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length];
      if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
      store("outbox-theme", next);
      showTheme();
    });
  }

  // --- relative times, which count on between two refreshes
  const UNITS = [["day", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const span = (seconds) => { // as units.py writes it
    const [unit, size] = UNITS.find(([, size]) => seconds >= size) ?? UNITS[3];
    const count = Math.floor(seconds / size);
    return `${count} ${unit}${unit === "day" && count > 1 ? "s" : ""}`;
  };

  const showTimes = () => {
    for (const each of document.querySelectorAll("time[data-now]")) {
      const at = Date.parse(each.dateTime);
      if (Number.isNaN(at)) continue;
      each.shownAt ??= Date.now();
      const now = Date.parse(each.dataset.now) + Date.now() - each.shownAt; // the database's clock, not the reader's
      const text = at > now ? `in ${span((at - now) / 1000)}` : `${span((now - at) / 1000)} ago`;
      if (each.textContent !== text) each.textContent = text;
      each.title = new Date(at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
    }
  };
  const showClocks = () => { // of the charts, in the reader's time zone
    for (const each of document.querySelectorAll("[data-clock]")) {
      each.textContent = new Date(each.dataset.clock).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
    }
  };
  showClocks();
  showTimes();
  setInterval(showTimes, 1000);

  // --- the live part: it does not refresh in a hidden tab, while paused, or while it is being used
  const pause = document.getElementById("pause");
  const freshness = document.getElementById("freshness");
  let paused = stored("outbox-paused") === "yes";
  const showPause = () => {
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Refreshing stopped" : "Stop refreshing";
  };
  const inUse = (live) =>
    live.contains(document.activeElement) && document.activeElement !== live ||
    live.querySelector("details[open]") !== null || !window.getSelection().isCollapsed;
  if (pause && window.htmx) {
    pause.hidden = false;
    showPause();
    pause.addEventListener("click", () => { paused = !paused; store("outbox-paused", paused ? "yes" : "no"); showPause(); });
    setInterval(() => {
      const live = document.querySelector("[data-live]");
      if (!live || paused || document.hidden) return;
      if (!inUse(live)) window.htmx.trigger(live, "refresh");
      else if (freshness) freshness.textContent = "The page does not refresh while you work on it.";
    }, REFRESH_MS);
  }
  if (window.htmx) {
    document.body.addEventListener("htmx:beforeSwap", (event) => {
      const { xhr, target, shouldSwap, requestConfig } = event.detail;
      const isSignedOut = shouldSwap ? !xhr.responseText.includes(`id="${target.id}"`) : xhr.status === 401 && requestConfig.verb === "get";
      if (!isSignedOut) return;
      event.detail.shouldSwap = false; // it is a page of the host app: the browser shows it as a whole
      window.location.assign(xhr.responseURL);
    });
    document.body.addEventListener("htmx:afterSwap", () => { freshness.textContent = ""; showTimes(); showClocks(); });
    for (const failed of ["htmx:responseError", "htmx:sendError", "htmx:timeout"]) {
      document.body.addEventListener(failed, () => { freshness.textContent = "This page could not be refreshed. It shows an older state."; });
    }
  }
})();
