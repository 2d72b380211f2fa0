// The autoscaler: desired and running instances of each variant, and the reason.

import { $, copy, keep, part, say } from "./dom.js";
import { count, number } from "./words.js";

export function showScaling(data) {
  const groups = data.autoscaling;
  $("scaling-section").hidden = !groups.length;
  const cards = keep($("scaling"), groups.map((each) => `${each.endpoint}/${each.variant}`), () => copy("scaling-template"));
  groups.forEach((group, at) => {
    const card = cards[at];
    say(part(card, "name"), `${group.endpoint} / ${group.variant}`);
    say(part(card, "wanted"), `${number(group.desired)} desired, ${number(group.running)} running`);
    say(part(card, "why"), group.why ? `Because: ${group.why}.` : "No decision yet.");
    const start = group.last_start_s === null ? "" : ` The last start took ${number(group.last_start_s)} s.`;
    say(part(card, "limits"), `From ${number(group.min_capacity)} to ${count(group.max_capacity, "instance")}; a backlog of ${number(group.backlog)}.${start}`);
  });
}
