// The log of one process, following, in a dialog.

import { $, setText } from "./dom.js";

const MOST_LINES = 2000;
let stream = null;

export function setUpLog() {
  $("log-close").addEventListener("click", () => $("log").close());
  $("log").addEventListener("close", () => {
    stream?.close();
    stream = null;
  });
}

export function openLog(name) {
  stream?.close();
  setText($("log-title"), name);
  const place = $("log-lines");
  place.replaceChildren();
  let lines = [];
  $("log").showModal();
  place.focus();
  stream = new EventSource(`/api/log?name=${encodeURIComponent(name)}`);
  // After a lost connection the server begins again with the last lines.
  stream.onopen = () => (lines = []);
  stream.onmessage = (message) => {
    const follows = place.scrollTop + place.clientHeight >= place.scrollHeight - 40;
    lines = lines.concat(JSON.parse(message.data)).slice(-MOST_LINES);
    place.textContent = lines.join("\n");
    if (follows) place.scrollTop = place.scrollHeight;
  };
  stream.onerror = () => {
    if (!lines.length) place.textContent = "There is no log of this process here.";
  };
}
