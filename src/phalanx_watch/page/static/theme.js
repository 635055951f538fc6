/** Light or dark: as the system has it, unless a person chose. */

const NAMES = ["auto", "light", "dark"];
const KEY = "phalanx-theme";

/** Storage may be forbidden, as in a file opened from disk. @returns {string} */
export function themeName() {
  return document.documentElement.dataset.theme ?? "auto";
}

export function nextTheme() {
  setTheme(NAMES[(NAMES.indexOf(themeName()) + 1) % NAMES.length]);
}

/** @param {string} name */
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem(KEY, name);
  } catch {
    // It is then kept until the page is closed.
  }
}

function remembered() {
  try {
    return localStorage.getItem(KEY) ?? "auto";
  } catch {
    return "auto";
  }
}

setTheme(NAMES.includes(remembered()) ? remembered() : "auto");
