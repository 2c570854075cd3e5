"""The `kvferry` command.

`main` is the command line; `demo` runs two processes (`prefill`, `decode`, both on `child`) and
`report` says what came of it. The demo's idea of right bytes (`pattern`, `pools`) knows nothing
of spans and plans. Nothing is imported here.
"""
