"""/docs: one page that renders /openapi.json. Owns its text; loads nothing from other hosts, so it works offline."""

from __future__ import annotations

DOCS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Yeoul API</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; }
code { font: 14px ui-monospace, monospace; background: #eef3f6; padding: 0 .25em; border-radius: 3px; }
details { border-top: 1px solid #d5dee5; padding: .5rem 0; }
summary { cursor: pointer; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; }
</style>
<h1>Yeoul API</h1>
<p id="about"></p>
<div id="routes"></div>
<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>
<script>
function add(parent, tag, text) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}
function typeName(schema) {
  if (schema.anyOf) return schema.anyOf.map(typeName).filter(name => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.const) return schema.const;
  const name = [].concat(schema.type).filter(one => one !== "null").join(" or ");
  return name === "array" ? "array of " + typeName(schema.items) : name;
}
function rangeOf(schema) {
  return schema.minimum === undefined || schema.maximum === undefined ? "" : schema.minimum + " to " + schema.maximum;
}
function addFields(parent, schema) {
  const table = add(parent, "table"), head = add(table, "tr");
  for (const title of ["field", "type", "range", "meaning"]) add(head, "th", title);
  for (const [name, field] of Object.entries(schema.properties)) {
    const row = add(table, "tr");
    add(add(row, "td"), "code", name);
    for (const text of [typeName(field), rangeOf(field), field.description || ""]) add(row, "td", text);
  }
}
function addRoute(path, method, route) {
  const box = add(document.getElementById("routes"), "details");
  add(add(box, "summary"), "code", method.toUpperCase() + " " + path);
  add(box, "p", route.description || route.summary || "");
  if (route.requestBody) addFields(box, route.requestBody.content["application/json"].schema);
  for (const [status, response] of Object.entries(route.responses))
    add(box, "div", status + ": " + response.description);
}
fetch("/openapi.json").then(answer => answer.json()).then(api => {
  document.getElementById("about").textContent = api.info.description;
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, route] of Object.entries(methods)) addRoute(path, method, route);
});
</script>
</html>
"""
