// Applies the chosen colour scheme before the first paint; page.js offers the choice.
try {
  const theme = localStorage.getItem("ripstop-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is disabled: the system's scheme applies
}
