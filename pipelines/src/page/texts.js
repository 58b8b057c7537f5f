// Elements and numbers as text. Texts of runs reach the page through `element` alone, which makes text nodes of them.

/** An element with a class, attributes and children; a child that is no node becomes text. */
function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") {
      Object.entries(value).forEach(([event, heard]) => made.addEventListener(event, heard));
    } else if (name === "style") {
      Object.entries(value).forEach(([property, set]) => made.style.setProperty(property, set));
    } else if (value !== null && value !== false) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A number with four digits. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return value.toFixed(0);
  return String(Number(value.toPrecision(4)));
}

/** A label of an axis: `0.2`, `15k`, `3M`, `5e-5`. */
function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  const plain = (scaled, unit) => String(Number(scaled.toPrecision(6))) + unit;
  if (size >= 1e9) return plain(value / 1e9, "G");
  if (size >= 1e6) return plain(value / 1e6, "M");
  if (size >= 1e4) return plain(value / 1e3, "k");
  if (size > 0 && size < 2e-4) return Number(value.toPrecision(3)).toExponential();
  return plain(value, "");
}

/** A duration in at most two units. */
function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}
