// Before anything is drawn, so that a dark page does not flash white.
(() => {
  let theme = "";
  try {
    theme = localStorage.getItem("rollway-theme") ?? "";
  } catch {
    // Storage is off: the system decides.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
