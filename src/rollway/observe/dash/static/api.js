// Where the page's data come from: the dashboard, or, in a report, the file itself.

const data = document.getElementById("data");

/** What `rollway report` has put into the page; null on a dashboard. */
export const report = data ? JSON.parse(data.textContent) : null;

let run = 0; // which of a report's runs is shown

export function chooseRun(number) {
  run = number;
  return report.shown[run];
}

/** Ask the dashboard, or the file; null if there is no answer. */
export async function ask(path) {
  if (report) {
    const [name, key] = [path.split("?")[0], new URLSearchParams(path.split("?")[1]).get("key")];
    const { hits, refits } = report.shown[run];
    return { "/api/hits": { workers: hits }, "/api/refit": refits[key] }[name] ?? null;
  }
  const answer = await fetch(path);
  return answer.ok ? answer.json() : null;
}
