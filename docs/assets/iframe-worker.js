/* Search in pages opened from the disk. Browsers start no Worker for file:// addresses, so there the search script runs
   in a hidden frame, which gets the page's messages as its own and answers by messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inside.importScripts = (...names) =>
        names.reduce((before, name) => before.then(() => this.load(frame, new URL(name, url))), Promise.resolve())
      this.load(frame, url).then(() => {
        this.inside = inside
        this.waiting.splice(0).forEach(data => this.send(data))
      })
    }

    load(frame, address) {
      return new Promise((done, failed) => {
        const script = frame.contentDocument.createElement("script")
        script.src = address
        script.onload = done
        script.onerror = failed
        frame.contentDocument.body.appendChild(script)
      })
    }

    send(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }

    postMessage(data) {
      if (this.inside) this.send(data)
      else this.waiting.push(data)
    }

    terminate() {}
  }
}
