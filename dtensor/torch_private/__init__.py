"""All uses of torch's private API: tensors and traces (`core`), symbolic sizes (`sizes`), the compiler (`compiling`,
`dynamo`) and FSDP (`fsdp`). No other file names private parts of torch. `core` checks the version of torch."""
