"""What is not public in torch, in the only files that name it: tensors and traces (`core`), symbolic sizes (`sizes`),
the compiler (`compiling`, `dynamo`) and FSDP (`fsdp`). `core` checks the version of torch."""
