"""The transfer engine: a pure core under a thin asyncio shell. Import its names from `kvferry`.

The core decides. Its mathematics: `spans` and `trims` (which blocks), `tensors` and `layout` (where
they lie), `topology` (who holds them), `boxes`, `template`, `align` and `plan` (from two sides to
copies). Its states: `transitions` has the tables, `lease`, `session` and `transfer` the machines.
`pipeline`, `scheduler` and `mover` move what `source` has paired with the offers that `target`
makes, over the sessions that `source_sessions` and `target_links` keep; `router` is the whole of
it. The shell acts: `driver`, `connections`, `control` and `tasks` carry decisions out, `service`
and `handles` are the API; `thread`, `thread_loop` and `hosted` are the one for synchronous hosts.
Transports, networks and hosts are known only by `ports`.
"""
