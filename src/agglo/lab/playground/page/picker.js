// An image from the examples or from a file, as the component's value: "example:..." or a data URL.
const tell = text => { element.querySelector(".said").textContent = text; };

const read = blob => new Promise((done, fail) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => fail(reader.error);
  reader.readAsDataURL(blob);
});

// Photographs of phones have many times the pixels that any model looks at, and go to the server at every move.
async function shrunk(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, props.longest / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise(done => canvas.toBlob(done, "image/jpeg", 0.92));
}

async function take(file) {
  if (!file) return;
  tell("");
  const blob = file.size > props.large ? await shrunk(file).catch(() => file) : file;
  if (blob.size > props.most) { tell(props.too_large); return; }
  props.value = await read(blob); // which is a change, and told
}

element.addEventListener("click", event => {
  const button = event.target.closest("[data-pick]");
  if (button) props.value = button.dataset.pick;
});
element.addEventListener("change", async event => {
  if (event.target.type !== "file") return;
  await take(event.target.files[0]);
  event.target.value = ""; // the same file may be chosen again, changed meanwhile
});
element.addEventListener("dragover", event => event.preventDefault());
element.addEventListener("drop", event => {
  event.preventDefault();
  take(event.dataTransfer.files[0]);
});
