"""The transfer engine: a pure core under a thin asyncio shell. Import its names from `kvferry`.

The core decides (`spans`, `layout`, `plan`, `transitions`, `lease`, `session`, `transfer`,
`pipeline`, `scheduler`, `target`, `source`, `router`), the shell acts (`control`, `driver`,
`service`). It knows transports, networks and hosts only by `ports`.
"""
